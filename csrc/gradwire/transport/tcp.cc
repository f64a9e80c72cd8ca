// tcp: one stream socket per peer, or several where the way is long: one stream fills it only as
// far as the kernel's buffers go. A message is sent as prefix, payload and padding to 8 bytes; over
// a sealed socket payload and padding are encrypted, and a tag follows, which covers the prefix. A
// sender stages it in a cell and pushes out what a socket takes; a receiver reads each stream into
// one buffer, in which whole frames are shown in place, in the order of their numbers.
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "gradwire/base/error.h"
#include "gradwire/transport/queued.h"
#include "gradwire/transport/settings_reader.h"
#include "gradwire/transport/tcp_frames.h"
#include "gradwire/transport/tcp_traffic.h"

namespace gradwire::transport {
namespace {

constexpr const char* kClosed = "the peer closed it or died";

class TcpTransport final : public QueuedTransport {
 public:
  explicit TcpTransport(const LinkOptions& options);
  ~TcpTransport() override;

  // Clears stale edges, since the bell is edge-triggered, before the caller's last look. So a peer
  // from which nobody reads does not keep it ringing.
  void arm() override;
  void disarm() override { armed_ = false; }

 private:
  struct TcpStream {
    Stream wire{-1};
    int wakes_at = 1;    // received bytes for which the kernel rings the doorbell
    AlignedBuffer copy;  // of a frame that this stream changes, where others read its cell, too
    int cell = kNoCell;  // that is being sent
    ConstBytes unsent;   // of its frame; empty where none of it was sent
    Inbox inbox;
    bool ended = false;
  };
  struct TcpLink {
    std::vector<TcpStream> streams;    // one, or more over a long way
    TcpStream* front = nullptr;        // the stream of the message that was shown
    std::uint32_t sent = 0, read = 0;  // frames; not counted where there is one stream
    bool counts() const noexcept { return streams.size() > 1; }
  };

  void connect(Rank peer, const WaitLimit& wait_limit) override;
  void add_stream(const Stream& wire, Rank peer, bool several);
  std::size_t unsent(Rank peer) const override;
  std::byte* staging(int cell) noexcept override { return frame(cell) + kPayloadAt; }
  void post(int cell, std::size_t bytes, std::span<const Rank> peers) override;
  std::optional<ConstBytes> arrived(Rank peer) override;
  void consume(Rank peer) override;

  TcpLink& link_to(Rank peer) noexcept { return links_[at(peer)]; }
  std::byte* frame(int cell) noexcept { return frames_[at(cell)].data(); }
  void push_out(Rank peer) override;
  void push_on(Rank peer) override { push_out(peer); }
  bool push(TcpStream& stream, Rank peer);
  bool begin_frame(TcpStream& stream, Rank peer);
  ConstBytes on_wire(TcpStream& stream, Rank peer);
  void finish_frame(TcpStream& stream) noexcept;
  bool read_some(TcpStream& stream, Rank peer);
  void await_frame(TcpStream& stream) noexcept;
  void end_stream(const TcpStream& stream, Rank peer, const std::string& failure);
  void drop_unsent(Rank peer, const std::string& reason);

  std::shared_ptr<TcpTraffic> traffic_;
  std::vector<TcpLink> links_;
  std::vector<AlignedBuffer> frames_;  // by cell
  bool armed_ = false;                 // this rank looks once more before it sleeps
};

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
  add_stream(all.stream(), peer, !all.more.empty());
  for (const Connection& each : all.more) add_stream(each.stream(), peer, true);
}

void TcpTransport::add_stream(const Stream& wire, Rank peer, bool several) {
  set_no_delay(wire.socket);
  traffic_->add(wire.socket);
  TcpStream& stream = link_to(peer).streams.emplace_back();
  stream.wire = wire;
  stream.inbox = Inbox(max_message(), wire.seal);
  if (wire.seal != nullptr || several) stream.copy = frame_buffer(max_message());
  watch_descriptor(wire.socket, EPOLLIN | EPOLLOUT | EPOLLET, peer);
}

std::size_t TcpTransport::unsent(Rank peer) const {
  const auto sends = [](const TcpStream& stream) { return stream.cell != kNoCell; };
  const auto sending = std::ranges::count_if(links_[at(peer)].streams, sends);
  return QueuedTransport::unsent(peer) + static_cast<std::size_t>(sending);
}

void TcpTransport::post(int cell, std::size_t bytes, std::span<const Rank> peers) {
  const Prefix prefix(bytes);
  const std::size_t whole = frame_bytes(bytes);
  std::memcpy(frame(cell) + kFrameAt, &prefix, sizeof prefix);
  std::memset(frame(cell) + kPayloadAt + bytes, 0, whole - sizeof prefix - bytes);
  queue(cell, whole, peers);
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
  while (stream.cell != kNoCell || begin_frame(stream, peer)) {
    traffic_->share(stream.wire.socket);
    const ssize_t sent = ::send(stream.wire.socket, stream.unsent.data(), stream.unsent.size(),
                                MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && !would_block(errno)) drop_unsent(peer, system_message("sending failed", errno));
    if (sent < 0) return false;
    stream.unsent = stream.unsent.subspan(static_cast<std::size_t>(sent));
    if (stream.unsent.empty()) finish_frame(stream);
  }
  return true;
}

// Takes the oldest frame of the outbox; returns whether there is one that can be sent.
bool TcpTransport::begin_frame(TcpStream& stream, Rank peer) {
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
  release_cell(stream.cell);
  stream.cell = kNoCell;
  stream.unsent = {};
}

// What the peer sent before may still be here: only arrived() ends the receiving side.
void TcpTransport::drop_unsent(Rank peer, const std::string& reason) {
  for (TcpStream& stream : link_to(peer).streams)
    if (stream.cell != kNoCell) finish_frame(stream);
  drop_outbox(peer, reason);
}

std::optional<ConstBytes> TcpTransport::arrived(Rank peer) {
  TcpLink& link = link_to(peer);
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
  link.front->inbox.pop();
  if (link.counts()) ++link.read;
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
  if (!stream.inbox.empty()) return drop_unsent(peer, reason + " in the middle of a message");
  if (!failure.empty() || std::ranges::all_of(streams, &TcpStream::ended))
    drop_unsent(peer, reason);
}

void TcpTransport::arm() {
  armed_ = true;
  std::array<epoll_event, 64> edges;
  while (::epoll_wait(doorbell(), edges.data(), edges.size(), 0) == edges.size()) continue;
}

}  // namespace

constexpr EnvironmentVariable kVariables[] = {
    {"GRADWIRE_RATE",
     "most that a rank sends over TCP, and at some hours: 200mbit, 200mbit,08:00-18:00=50mbit",
     "no limit"},
    {"GRADWIRE_TCP_CONGESTION", "congestion control of TCP links: bbr, cubic", "the kernel's"},
    kTrafficClass,
};

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
