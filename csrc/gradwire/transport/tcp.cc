// tcp: one stream socket per peer. A message is sent as prefix, payload and padding to 8 bytes;
// over a sealed socket payload and padding are encrypted, and a tag follows, which covers the
// prefix. A sender stages it in a cell and pushes out what the socket takes; a receiver reads the
// stream into one buffer per peer, in which whole frames are shown in place.
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "gradwire/base/error.h"
#include "gradwire/transport/queued.h"
#include "gradwire/transport/tcp_frames.h"

namespace gradwire::transport {
namespace {

constexpr const char* kClosed = "the peer closed it or died";

class TcpTransport final : public QueuedTransport {
 public:
  explicit TcpTransport(const LinkOptions& options);

  // Clears stale edges, since the bell is edge-triggered, before the caller's last look. So a peer
  // from which nobody reads does not keep it ringing.
  void arm() override;
  void disarm() override {}

 private:
  struct TcpLink {
    AlignedBuffer sealed;  // the outbox's front frame, where others read its cell, too
    ConstBytes unsent;     // of the outbox's front frame; empty where none of it was sent
    Inbox inbox;
    bool ended = false;
  };

  void connect(Rank peer, const WaitLimit& wait_limit) override;
  std::byte* staging(int cell) noexcept override { return frame(cell) + kPayloadAt; }
  void post(int cell, std::size_t bytes, std::span<const Rank> peers) override;
  std::optional<ConstBytes> arrived(Rank peer) override;
  void consume(Rank peer) override { link_to(peer).inbox.pop(); }

  TcpLink& link_to(Rank peer) noexcept { return links_[at(peer)]; }
  std::byte* frame(int cell) noexcept { return frames_[at(cell)].data(); }
  void push_out(Rank peer) override;
  void push_on(Rank peer) override { push_out(peer); }
  bool prepare_front(Rank peer);
  ConstBytes front_on_wire(Rank peer);
  bool read_some(Rank peer);

  std::vector<TcpLink> links_;
  std::vector<AlignedBuffer> frames_;  // by cell
};

TcpTransport::TcpTransport(const LinkOptions& options)
    : QueuedTransport("tcp", options), links_(at(options.size)) {
  for (int i = 0; i < options.messages; ++i) frames_.push_back(frame_buffer(options.max_message));
}

void TcpTransport::connect(Rank peer, const WaitLimit&) {
  const Stream stream = connection(peer).stream();
  set_no_delay(stream.socket);
  link_to(peer).inbox = Inbox(max_message(), stream.seal);
  if (stream.seal != nullptr) link_to(peer).sealed = frame_buffer(max_message());
  watch_descriptor(stream.socket, EPOLLIN | EPOLLOUT | EPOLLET, peer);
}

void TcpTransport::post(int cell, std::size_t bytes, std::span<const Rank> peers) {
  const Prefix prefix(bytes);
  const std::size_t whole = frame_bytes(bytes);
  std::memcpy(frame(cell) + kFrameAt, &prefix, sizeof prefix);
  std::memset(frame(cell) + kPayloadAt + bytes, 0, whole - sizeof prefix - bytes);
  queue(cell, whole, peers);
}

void TcpTransport::push_out(Rank peer) {
  TcpLink& link = link_to(peer);
  const Stream stream = connection(peer).stream();
  while (!is_flushed(peer)) {
    if (link.unsent.empty() && !prepare_front(peer)) return;
    const ssize_t sent =
        ::send(stream.socket, link.unsent.data(), link.unsent.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && would_block(errno)) return;
    if (sent < 0) return drop_outbox(peer, system_message("sending failed", errno));
    link.unsent = link.unsent.subspan(static_cast<std::size_t>(sent));
    if (link.unsent.empty()) release_cell(outbox(peer).pop());
  }
  if (stream.seal != nullptr)
    stream.seal->prepare_to_seal();  // the next one, while this one is on its way
}

// Returns whether the front frame can be sent.
bool TcpTransport::prepare_front(Rank peer) {
  try {
    link_to(peer).unsent = front_on_wire(peer);
    return true;
  } catch (const Error& error) {  // of libcrypto
    drop_outbox(peer, error.what());
    return false;
  }
}

// Seals a frame as it is about to be sent, in place where nobody else will read the cell: it was
// mostly staged just before, and is in this processor's cache.
ConstBytes TcpTransport::front_on_wire(Rank peer) {
  crypto::Seal* const seal = connection(peer).seal.get();
  const int front = outbox(peer).front();
  const Cell& cell = cell_at(front);
  const ConstBytes plain(frame(front) + kFrameAt, cell.bytes);
  if (seal == nullptr) return plain;
  std::byte* out = (cell.readers == 1 ? frame(front) : link_to(peer).sealed.data()) + kFrameAt;
  if (out != plain.data()) std::memcpy(out, plain.data(), sizeof(Prefix));
  seal->seal(plain.first(sizeof(Prefix)), plain.subspan(sizeof(Prefix)), out + sizeof(Prefix));
  return {out, plain.size() + crypto::kTagBytes};
}

std::optional<ConstBytes> TcpTransport::arrived(Rank peer) {
  Inbox& inbox = link_to(peer).inbox;
  do {
    if (const auto message = inbox.front(link_id(peer))) return message;
  } while (read_some(peer));
  return std::nullopt;
}

bool TcpTransport::read_some(Rank peer) {
  TcpLink& link = link_to(peer);
  const Stream stream = connection(peer).stream();
  if (link.ended) return false;
  const Bytes room = link.inbox.room();
  const ssize_t got = ::recv(stream.socket, room.data(), room.size(), MSG_DONTWAIT);
  if (got < 0 && would_block(errno)) {
    if (stream.seal != nullptr)
      stream.seal->prepare_to_open();  // what is to come, while nothing is here
    return false;
  }
  if (got <= 0) {
    const std::string reason = got < 0 ? system_message("receiving failed", errno) : kClosed;
    link.ended = true;
    drop_outbox(peer, link.inbox.empty() ? reason : reason + " in the middle of a message");
    return false;
  }
  link.inbox.received(static_cast<std::size_t>(got));
  return true;
}

void TcpTransport::arm() {
  std::array<epoll_event, 64> edges;
  while (::epoll_wait(doorbell(), edges.data(), edges.size(), 0) == edges.size()) continue;
}

}  // namespace

extern constinit const TransportKind tcp_kind{
    .name = "tcp",
    .make = [](const LinkOptions& options) -> std::unique_ptr<Transport> {
      return std::make_unique<TcpTransport>(options);
    },
};

}  // namespace gradwire::transport
