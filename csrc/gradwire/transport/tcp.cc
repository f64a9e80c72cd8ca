#include "gradwire/transport/tcp.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "gradwire/base/error.h"
#include "gradwire/transport/settings_reader.h"

namespace gradwire::transport {
namespace {

constexpr const char* kClosed = "the peer closed it or died";
constexpr const char* kSwallowed =
    "what was sent on one of its TCP streams was not acknowledged, though others may work";
// How often links of several streams are looked after, also while their rank sleeps.
constexpr std::chrono::milliseconds kLook{250};
// A socket of one of several ways takes no more than it can send soon, or one way would have more
// to do than another at the end of a call.
constexpr int kMostNotSent = 256 * 1024;

}  // namespace

TcpTransport::TcpTransport(const LinkOptions& options)
    : QueuedTransport("tcp", options),
      traffic_(std::static_pointer_cast<TcpTraffic>(options.context)),
      links_(at(options.size)) {
  for (int i = 0; i < options.messages; ++i) frames_.push_back(frame_buffer(options.max_message));
}

TcpTransport::~TcpTransport() {
  for (const TcpLink& link : links_)
    for (const TcpStream& stream : link.streams) traffic_->remove(stream.wire.socket);
}

void TcpTransport::connect(Rank peer, const WaitLimit&) {
  const Connection& all = connection(peer);
  TcpLink& link = link_to(peer);
  if (all.ways != nullptr) link.ways = std::make_unique<TcpWays>(all.ways, max_message());
  add_stream(all, peer, !all.more.empty());
  for (const Connection& each : all.more) {
    if (each.acknowledges)
      add_way(each, peer);
    else
      add_stream(each, peer, true);
  }
  if (link.counts()) {
    looked_after_.push_back(peer);
    watch_streams();
  }
}

void TcpTransport::watch_streams() {
  if (timer_.valid()) return;
  timer_ = UniqueFd(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  constexpr timespec kPeriod{0, std::chrono::nanoseconds(kLook).count()};
  const itimerspec spec{kPeriod, kPeriod};
  if (!timer_.valid() || ::timerfd_settime(timer_.get(), 0, &spec, nullptr) != 0)
    throw Error(system_message("timerfd", errno));
  watch_descriptor(timer_.get(), EPOLLIN | EPOLLET, kNoPeer);
}

void TcpTransport::add_stream(const Connection& from, Rank peer, bool several) {
  link_to(peer).streams.push_back(make_stream(from, peer, several));
}

TcpTransport::TcpStream TcpTransport::make_stream(const Connection& from, Rank peer, bool several) {
  const Stream wire = from.stream();
  set_no_delay(wire.socket);
  if (link_to(peer).ways != nullptr)  // not of a Unix socket, in tests
    ::setsockopt(wire.socket, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kMostNotSent, sizeof kMostNotSent);
  TcpStream stream;
  stream.wire = wire;
  stream.way = from.way;
  stream.inbox = Inbox(max_message(), wire.seal);
  if (wire.seal != nullptr || several) stream.copy = frame_buffer(max_message());
  watch_descriptor(wire.socket, EPOLLIN | EPOLLOUT | EPOLLET, peer);
  traffic_->add(wire.socket);
  if (link_to(peer).ways != nullptr) link_to(peer).ways->add_data(wire.socket, from.way);
  return stream;
}

std::size_t TcpTransport::unsent(Rank peer) const {
  const TcpLink& link = links_[at(peer)];
  const auto sends = [&](const TcpStream& stream) {
    return !stream.unsent.empty() && (link.ways == nullptr || link.ways->usable(stream.way));
  };
  const auto sending = std::ranges::count_if(link.streams, sends);
  const bool resends = link.ways != nullptr && !link.ways->all_ended() && why_gone(peer).empty();
  const std::size_t again = resends ? link.ways->to_send_again() : 0;
  return QueuedTransport::unsent(peer) + again + static_cast<std::size_t>(sending);
}

void TcpTransport::post(int cell, std::size_t bytes, std::span<const Rank> peers) {
  const Prefix prefix(bytes);
  const std::size_t whole = frame_bytes(bytes);
  std::memcpy(frame(cell) + kFrameAt, &prefix, sizeof prefix);
  std::memset(frame(cell) + kPayloadAt + bytes, 0, whole - sizeof prefix - bytes);
  queue(cell, whole, peers);
}

void TcpTransport::push_on(Rank peer) {
  if (link_to(peer).counts()) look_after(peer);
  if (link_to(peer).ways != nullptr) serve_ways(peer);
  push_out(peer);
}

// The first stream takes all frames; the next ones those for which it has no room.
void TcpTransport::push_out(Rank peer) {
  for (TcpStream& stream : link_to(peer).streams) {
    if (push(stream, peer) && stream.wire.seal != nullptr)
      stream.wire.seal->prepare_to_seal();  // the next one, while this one is on its way
  }
}

// Sends frames until the socket takes no more; returns whether it took all that there were.
bool TcpTransport::push(TcpStream& stream, Rank peer) {
  while (!stream.unsent.empty() || begin_frame(stream, peer)) {
    traffic_->share(stream.wire.socket);
    const ssize_t sent = ::send(stream.wire.socket, stream.unsent.data(), stream.unsent.size(),
                                MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && !would_block(errno)) {
      const std::string failure = system_message("sending failed", errno);
      if (link_to(peer).ways == nullptr)
        drop_unsent(peer, failure);
      else
        end_way(stream, peer, failure);
    }
    if (sent < 0) return false;
    stream.unsent = stream.unsent.subspan(static_cast<std::size_t>(sent));
    if (stream.unsent.empty()) finish_frame(stream);
  }
  return true;
}

// Takes the oldest frame of the outbox; returns whether there is one that can be sent.
bool TcpTransport::begin_frame(TcpStream& stream, Rank peer) {
  if (link_to(peer).ways != nullptr) return begin_kept_frame(stream, peer);
  if (outbox(peer).empty()) return false;
  stream.cell = outbox(peer).pop();
  try {
    stream.unsent = on_wire(stream, peer);
    return true;
  } catch (const Error& error) {  // of libcrypto
    drop_unsent(peer, error.what());
    return false;
  }
}

// Numbers and seals a frame as it is about to be sent, in place where nobody else will read the
// cell: it was mostly staged just before, and is in this processor's cache.
ConstBytes TcpTransport::on_wire(TcpStream& stream, Rank peer) {
  TcpLink& link = link_to(peer);
  const Cell& cell = cell_at(stream.cell);
  const ConstBytes plain(frame(stream.cell) + kFrameAt, cell.bytes);
  if (stream.wire.seal == nullptr && !link.counts()) return plain;
  std::byte* out = (cell.readers == 1 ? frame(stream.cell) : stream.copy.data()) + kFrameAt;
  if (out != plain.data())
    std::memcpy(out, plain.data(), stream.wire.seal != nullptr ? sizeof(Prefix) : plain.size());
  if (link.counts()) {
    Prefix prefix;
    std::memcpy(&prefix, out, sizeof prefix);
    prefix = Prefix(prefix.length, link.sent++);
    std::memcpy(out, &prefix, sizeof prefix);
  }
  if (stream.wire.seal == nullptr) return {out, plain.size()};
  const ConstBytes prefix(out, sizeof(Prefix));
  stream.wire.seal->seal(prefix, plain.subspan(sizeof(Prefix)), out + sizeof(Prefix));
  return {out, plain.size() + crypto::kTagBytes};
}

void TcpTransport::finish_frame(TcpStream& stream) noexcept {
  if (stream.cell != kNoCell) release_cell(stream.cell);
  stream.cell = kNoCell;
  stream.unsent = {};
}

// What the peer sent before may still be here: only arrived() ends the receiving side.
void TcpTransport::drop_unsent(Rank peer, const std::string& reason) {
  for (TcpStream& stream : link_to(peer).streams) finish_frame(stream);
  if (connection(peer).ways != nullptr) connection(peer).ways->finish();
  drop_outbox(peer, reason);
}

std::optional<ConstBytes> TcpTransport::arrived(Rank peer) {
  TcpLink& link = link_to(peer);
  if (link.counts()) look_after(peer);
  if (link.ways != nullptr) return arrived_by_ways(peer);
  const std::uint32_t ahead = link.counts() ? kAhead : 1;
  for (bool more = true; more;) {
    more = false;
    for (TcpStream& stream : link.streams) {
      if (const auto message = stream.inbox.front(link_id(peer), link.read, ahead)) {
        link.front = &stream;
        return message;
      }
      more |= read_some(stream, peer);
    }
  }
  return std::nullopt;
}

void TcpTransport::consume(Rank peer) {
  TcpLink& link = link_to(peer);
  if (TcpStream* shown = std::exchange(link.front, nullptr)) shown->inbox.pop();
  if (link.ways != nullptr) {
    link.ways->consume();
    if (link.ways->owes()) acknowledge(peer, /*missing=*/false);
  } else if (link.counts()) {
    ++link.read;
  }
}

bool TcpTransport::read_some(TcpStream& stream, Rank peer) {
  if (stream.ended || stream.inbox.has_frame()) return false;
  const Bytes room = stream.inbox.room();
  const ssize_t got = ::recv(stream.wire.socket, room.data(), room.size(), MSG_DONTWAIT);
  if (got < 0 && would_block(errno)) {
    if (armed_) await_frame(stream);
    if (stream.wire.seal != nullptr)
      stream.wire.seal->prepare_to_open();  // what is to come, while nothing is here
    return false;
  }
  if (got <= 0) {
    stream.ended = true;
    end_stream(stream, peer, got < 0 ? system_message("receiving failed", errno) : "");
    return false;
  }
  stream.inbox.received(static_cast<std::size_t>(got));
  return true;
}

// Has the doorbell ring when the rest of the frame is here, and not for every packet; or as much of
// it as lets the sender go on while this rank wakes up: Linux holds half of the buffer's size. It
// rings at once for what came since the last look. At the start of a frame nobody knows its length.
void TcpTransport::await_frame(TcpStream& stream) noexcept {
  int room = 0;
  socklen_t size = sizeof room;
  ::getsockopt(stream.wire.socket, SOL_SOCKET, SO_RCVBUF, &room, &size);
  const auto missing = static_cast<int>(stream.inbox.missing());
  const int bytes = std::max(1, std::min(missing, room / 4));
  if (std::exchange(stream.wakes_at, bytes) != bytes)
    ::setsockopt(stream.wire.socket, SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes);
}

// A peer is gone when all its streams have ended, since the end of one may overtake the data of
// another; and at once where one failed or ended in the middle of a message.
void TcpTransport::end_stream(const TcpStream& stream, Rank peer, const std::string& failure) {
  const auto& streams = link_to(peer).streams;
  const std::string reason = failure.empty() ? kClosed : failure;
  if (link_to(peer).ways != nullptr) return end_way(stream, peer, reason);
  if (!stream.inbox.empty()) return drop_unsent(peer, reason + " in the middle of a message");
  if (!failure.empty() || std::ranges::all_of(streams, &TcpStream::ended))
    drop_unsent(peer, reason);
}

void TcpTransport::look_after(Rank peer) {
  TcpLink& link = link_to(peer);
  const auto now = Clock::now();
  if (now < link.look_at || !why_gone(peer).empty()) return;
  link.look_at = now + kLook;
  if (link.ways == nullptr)
    end_if_swallowed(peer, now);
  else
    look_after_ways(peer, now);
}

// Such a stream has no TCP_USER_TIMEOUT, since its reader may pause; and while others bring
// something, nobody would miss it.
void TcpTransport::end_if_swallowed(Rank peer, Clock::time_point now) {
  for (TcpStream& stream : link_to(peer).streams) {
    const double stalled = stream.stall.seconds(stream.wire.socket, now);
    if (stalled < kStalledSeconds) continue;
    const double limit = seconds_to_dead(stream.wire.socket);
    const auto found = silence_of(stream.wire.socket);
    if (stalled >= limit && found && found->seconds >= limit) return drop_unsent(peer, kSwallowed);
  }
}

void TcpTransport::arm() {
  armed_ = true;
  for (const Rank peer : looked_after_) {
    look_after(peer);
    if (link_to(peer).ways != nullptr && serve_ways(peer)) push_out(peer);
  }
  std::array<epoll_event, 64> edges;
  while (::epoll_wait(doorbell(), edges.data(), edges.size(), 0) == edges.size()) continue;
}

namespace {

constexpr EnvironmentVariable kVariables[] = {
    {"GRADWIRE_RATE",
     "most that a rank sends over TCP, and at some hours: 200mbit, 200mbit,08:00-18:00=50mbit",
     "no limit"},
    {"GRADWIRE_TCP_CONGESTION", "congestion control of TCP links: bbr, cubic", "the kernel's"},
    kTrafficClass,
};

}  // namespace

extern constinit const TransportKind tcp_kind{
    .name = "tcp",
    .make = [](const LinkOptions& options) -> std::unique_ptr<Transport> {
      return std::make_unique<TcpTransport>(options);
    },
    .open =
        [](const Settings& given) {
          return OpenedTransport{.context = std::make_shared<TcpTraffic>(given)};
        },
    .settings = kVariables,
};

}  // namespace gradwire::transport
