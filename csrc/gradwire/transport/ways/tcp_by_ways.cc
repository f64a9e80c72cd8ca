// What a tcp link does that goes over several ways; TcpWays has its frames, and the state of ways.
#include <algorithm>
#include <utility>

#include "gradwire/base/error.h"
#include "gradwire/transport/tcp.h"

namespace gradwire::transport {

// The socket of a way's acknowledgements.
void TcpTransport::add_way(const Connection& from, Rank peer) {
  set_no_delay(from.socket.get());
  link_to(peer).ways->add(from.stream(), from.way);
  watch_descriptor(from.socket.get(), EPOLLIN | EPOLLOUT | EPOLLET, peer);
}

// Not while the message that is shown lies in a stream's buffer.
void TcpTransport::take_new_ways(Rank peer) {
  const TcpLink& link = link_to(peer);
  const Connection& first = connection(peer);
  for (int way = 0; way < first.ways->count(); ++way) {
    if (link.front != nullptr && link.front->way == way) continue;
    if (auto made = first.ways->take(way, first.part); !made.empty())
      renew_way(peer, way, std::move(made));
  }
}

// What the old sockets have and was not read, the peer sends again: it makes the way anew, too.
void TcpTransport::renew_way(Rank peer, int way, std::vector<Connection> sockets) {
  std::vector<Connection*> old;
  Connection& first = connection(peer);
  if (first.way == way) old.push_back(&first);
  for (Connection& each : first.more)
    if (each.way == way) old.push_back(&each);
  if (old.size() != sockets.size()) return;
  TcpWays& ways = *link_to(peer).ways;
  try {
    ways.renew(way, sockets.front().generation);
    for (std::size_t i = 0; i < old.size(); ++i) renew_socket(*old[i], std::move(sockets[i]), peer);
    acknowledge(peer, /*missing=*/false);  // which says that the old sockets have ended
  } catch (const Error& error) {
    ways.leave_out(way, TcpWays::State::kEnded, error.what());
  }
}

void TcpTransport::renew_socket(Connection& old, Connection made, Rank peer) {
  made.acknowledges = old.acknowledges;
  TcpLink& link = link_to(peer);
  if (made.acknowledges) {
    add_way(made, peer);
  } else {
    TcpStream stream = make_stream(made, peer, true);
    const auto same = [&](const TcpStream& each) { return each.wire.socket == old.socket.get(); };
    *std::ranges::find_if(link.streams, same) = std::move(stream);
    traffic_->remove(old.socket.get());
  }
  old.socket = std::move(made.socket);  // which closes the old one
  old.seal = std::move(made.seal);
}

// Takes a frame that was lost with another way, or the oldest of the outbox.
bool TcpTransport::begin_kept_frame(TcpStream& stream, Rank peer) {
  TcpWays& ways = *link_to(peer).ways;
  if (!ways.usable(stream.way)) return false;
  std::optional<std::uint32_t> number = ways.next_again();
  if (!number && (outbox(peer).empty() || !ways.has_room())) return false;
  if (!number) {
    const int cell = outbox(peer).pop();
    number = ways.keep({frame(cell) + kFrameAt, cell_at(cell).bytes});
    release_cell(cell);
  }
  try {
    stream.unsent = on_wire(stream, ways.send_by(*number, stream.way));
    return true;
  } catch (const Error& error) {  // of libcrypto
    drop_unsent(peer, error.what());
    return false;
  }
}

// Copies a kept frame, which may be freed before the socket has taken all of it.
ConstBytes TcpTransport::on_wire(TcpStream& stream, ConstBytes kept) {
  std::byte* out = stream.copy.data() + kFrameAt;
  if (stream.wire.seal == nullptr) {
    std::memcpy(out, kept.data(), kept.size());
    return {out, kept.size()};
  }
  std::memcpy(out, kept.data(), sizeof(Prefix));
  const ConstBytes prefix(out, sizeof(Prefix));
  stream.wire.seal->seal(prefix, kept.subspan(sizeof(Prefix)), out + sizeof(Prefix));
  return {out, kept.size() + crypto::kTagBytes};
}

// What comes before its turn is set aside: the frame whose turn it is may come behind it.
std::optional<ConstBytes> TcpTransport::arrived_by_ways(Rank peer) {
  TcpLink& link = link_to(peer);
  TcpWays& ways = *link.ways;
  if (ways.listens() && serve_ways(peer)) push_out(peer);
  link.front = nullptr;
  for (bool more = true; more;) {
    if (const auto message = ways.set_aside_before()) return message;
    more = false;
    for (TcpStream& stream : link.streams) {
      while (const auto frame = stream.inbox.any(link_id(peer), ways.read(), kMostKept)) {
        if (frame->number == ways.read()) {
          link.front = &stream;
          return frame->payload;
        }
        set_aside(peer, *frame);
        stream.inbox.pop();
      }
      more |= read_some(stream, peer);
    }
  }
  if (ways.sets_aside()) ways.drained(Clock::now());
  return std::nullopt;
}

// Not what lies in the stream of the message that is shown.
void TcpTransport::set_all_aside(Rank peer) {
  const TcpLink& link = link_to(peer);
  for (TcpStream& stream : link_to(peer).streams) {
    if (&stream == link.front) continue;
    do {
      while (const auto frame = stream.inbox.any(link_id(peer), link.ways->read(), kMostKept)) {
        set_aside(peer, *frame);
        stream.inbox.pop();
      }
    } while (read_some(stream, peer));
  }
}

void TcpTransport::set_aside(Rank peer, const Inbox::Numbered& frame) try {
  TcpWays& ways = *link_to(peer).ways;
  if (!ways.has(frame.number)) ways.set_aside(frame.number, frame.payload);
} catch (const Error& error) {
  throw_transport_error(link_id(peer), error.what());
}

bool TcpTransport::deliver() {
  bool all = true;
  for (const Rank peer : looked_after_) {
    const TcpLink& link = link_to(peer);
    if (link.ways == nullptr || !why_gone(peer).empty()) continue;
    push_on(peer);
    all = all && unsent(peer) == 0 && link.ways->delivered();
  }
  return all;
}

// The peer is gone when it has ended on all ways. What comes on others counts till then.
void TcpTransport::end_way(const TcpStream& stream, Rank peer, const std::string& failure) {
  TcpLink& link = link_to(peer);
  link.ways->leave_out(stream.way, TcpWays::State::kEnded, failure);
  for (TcpStream& each : link.streams)
    if (each.way == stream.way) each.unsent = {};
  const auto all_ended = [&] { return std::ranges::all_of(link.streams, &TcpStream::ended); };
  if (all_ended()) take_new_ways(peer);
  if (all_ended()) return drop_unsent(peer, failure);
  acknowledge(peer, /*missing=*/false);  // which says that it has ended
}

void TcpTransport::acknowledge(Rank peer, bool missing) {
  try {
    link_to(peer).ways->acknowledge(missing);
  } catch (const Error& error) {  // of libcrypto
    drop_unsent(peer, error.what());
  }
}

// Hears acknowledgements; returns whether there may be more to send.
bool TcpTransport::serve_ways(Rank peer) {
  TcpLink& link = link_to(peer);
  if (!why_gone(peer).empty()) return false;
  try {
    link.ways->hear(Clock::now());
  } catch (const Error& error) {
    drop_unsent(peer, error.what());
    return false;
  }
  for (TcpStream& stream : link.streams)
    if (link.ways->ended(stream.way)) stream.unsent = {};
  return link.ways->changed();
}

// A way is stalled when its peer acknowledges nothing and says nothing: a process that pauses may
// have no room for what was sent, but its kernel answers.
void TcpTransport::look_after_ways(Rank peer, Clock::time_point now) {
  take_new_ways(peer);
  TcpLink& link = link_to(peer);
  TcpWays& ways = *link.ways;
  ways.tell(now);  // of what lasted, also where it is over now
  const double limit = seconds_to_dead(link.streams.front().wire.socket);
  std::vector<double> waits(at(connection(peer).counts().ways));
  std::vector<bool> stalled(waits.size());
  bool silent = true;  // on all ways
  for (TcpStream& stream : link.streams) {
    const double waiting = stream.stall.seconds(stream.wire.socket, now);
    const auto found = silence_of(stream.wire.socket);
    const double unheard = found ? found->seconds : 0;
    waits[at(stream.way)] = std::max(waits[at(stream.way)], waiting);
    if (std::min(waiting, unheard) >= kStalledSeconds) stalled[at(stream.way)] = true;
    silent = silent && (stream.ended || unheard >= limit);
  }
  for (std::size_t way = 0; way < waits.size(); ++way) {
    if (stalled[way])
      ways.leave_out(static_cast<int>(way), TcpWays::State::kLeftOut,
                     "what was sent is not acknowledged");
    else if (waits[way] == 0)
      ways.use_again(static_cast<int>(way));
  }
  // This rank may wait for others for long, and these for the peer, which sends again what it does
  // not know to be read.
  if (armed_) set_all_aside(peer);
  if (const bool missing = ways.misses_one(now); missing || ways.owes(1))
    acknowledge(peer, missing);
  const double unusable = std::chrono::duration<double>(now - ways.unusable_since(now)).count();
  if (silent && unusable > limit) return drop_unsent(peer, "it is reached by no way any more");
  push_out(peer);
}

}  // namespace gradwire::transport
