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
#include "gradwire/transport/staged.h"
#include "gradwire/transport/tcp_frames.h"

namespace gradwire::transport {
namespace {

constexpr const char* kClosed = "the peer closed it or died";

class TcpTransport final : public StagedTransport {
 public:
  explicit TcpTransport(const Options& options);

  bool flush() override;
  bool is_flushed(Rank peer) const override {
    return links_[static_cast<std::size_t>(peer)].outbox.empty();
  }
  int doorbell() const noexcept override { return epoll_.get(); }
  // Clears stale edges, since the bell is edge-triggered, before the caller's last look. So a peer
  // from which nobody reads does not keep it ringing.
  void arm() override;
  void disarm() override {}

 private:
  struct Link {
    UniqueFd socket;
    std::shared_ptr<crypto::Seal> seal;  // none: plain
    AlignedBuffer sealed;  // the outbox's front frame, where others read its cell, too
    CellQueue outbox;
    ConstBytes unsent;  // of the outbox's front frame; empty where none of it was sent
    Inbox inbox;
    bool ended = false;
  };
  struct Cell {
    AlignedBuffer frame;
    std::size_t bytes = 0;
    std::size_t readers = 0;
  };

  void link(Connection connection, Rank peer, const WaitLimit& wait_limit) override;
  bool has_its_share(Rank peer) override;
  int find_room(std::span<const Rank> peers, std::size_t bytes) override;
  std::byte* staging(int cell) noexcept override { return cell_at(cell).frame.data() + kPayloadAt; }
  void post(int cell, std::size_t bytes, std::span<const Rank> peers) override;
  std::optional<ConstBytes> arrived(Rank peer) override;
  void consume(Rank peer) override { at(peer).inbox.pop(); }

  Link& at(Rank peer) noexcept { return links_[static_cast<std::size_t>(peer)]; }
  Cell& cell_at(int cell) noexcept { return cells_[static_cast<std::size_t>(cell)]; }
  int first_free_cell() const noexcept;
  void push_out(Rank peer);
  bool prepare_front(Rank peer);
  ConstBytes front_on_wire(Link& link);
  void finish_front(Link& link);
  bool read_some(Rank peer);
  void drop_outbox(Rank peer, const std::string& reason);

  UniqueFd epoll_;
  std::vector<Link> links_;
  std::vector<Cell> cells_;
};

TcpTransport::TcpTransport(const Options& options)
    : StagedTransport("tcp", options),
      epoll_(make_epoll()),
      links_(static_cast<std::size_t>(options.size)),
      cells_(static_cast<std::size_t>(options.messages)) {
  for (Cell& cell : cells_) cell.frame = frame_buffer(options.max_message);
}

void TcpTransport::link(Connection connection, Rank peer, const WaitLimit&) {
  const int socket = connection.socket.get();
  set_no_delay(socket);
  Link& link = at(peer);
  link.outbox = CellQueue(cells_.size());
  link.inbox = Inbox(max_message(), connection.seal.get());
  if (connection.seal) link.sealed = frame_buffer(max_message());
  watch(epoll_.get(), socket, EPOLLIN | EPOLLOUT | EPOLLET, peer);
  link.socket = std::move(connection.socket);
  link.seal = std::move(connection.seal);
}

int TcpTransport::first_free_cell() const noexcept {
  for (std::size_t cell = 0; cell < cells_.size(); ++cell)
    if (cells_[cell].readers == 0) return static_cast<int>(cell);
  return kNoCell;
}

bool TcpTransport::has_its_share(Rank peer) {
  const auto share = static_cast<std::size_t>(options().messages_per_peer);
  if (at(peer).outbox.size() >= share) push_out(peer);
  return at(peer).outbox.size() >= share;
}

int TcpTransport::find_room(std::span<const Rank>, std::size_t) {
  const int cell = first_free_cell();
  if (cell != kNoCell) return cell;
  for (Rank peer = 0; peer < options().size; ++peer) push_out(peer);
  return first_free_cell();
}

void TcpTransport::post(int index, std::size_t bytes, std::span<const Rank> peers) {
  Cell& cell = cell_at(index);
  const Prefix prefix(bytes);
  cell.bytes = frame_bytes(bytes);
  cell.readers = peers.size();
  std::memcpy(cell.frame.data() + kFrameAt, &prefix, sizeof prefix);
  std::memset(cell.frame.data() + kPayloadAt + bytes, 0, cell.bytes - sizeof prefix - bytes);
  for (Rank peer : peers) at(peer).outbox.push(index);
  for (Rank peer : peers) push_out(peer);
}

bool TcpTransport::flush() {
  for (Rank peer = 0; peer < options().size; ++peer) {
    if (at(peer).outbox.empty()) continue;
    push_out(peer);
    throw_if_gone(peer);
  }
  return std::all_of(links_.begin(), links_.end(),
                     [](const Link& link) { return link.outbox.empty(); });
}

void TcpTransport::push_out(Rank peer) {
  Link& link = at(peer);
  while (!link.outbox.empty()) {
    if (link.unsent.empty() && !prepare_front(peer)) return;
    const ssize_t sent = ::send(link.socket.get(), link.unsent.data(), link.unsent.size(),
                                MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && would_block(errno)) return;
    if (sent < 0) return drop_outbox(peer, system_message("sending failed", errno));
    link.unsent = link.unsent.subspan(static_cast<std::size_t>(sent));
    if (link.unsent.empty()) finish_front(link);
  }
  if (link.seal) link.seal->prepare_to_seal();  // the next one, while this one is on its way
}

// Returns whether the front frame can be sent.
bool TcpTransport::prepare_front(Rank peer) {
  try {
    at(peer).unsent = front_on_wire(at(peer));
    return true;
  } catch (const Error& error) {  // of libcrypto
    drop_outbox(peer, error.what());
    return false;
  }
}

// Seals a frame as it is about to be sent, in place where nobody else will read the cell: it was
// mostly staged just before, and is in this processor's cache.
ConstBytes TcpTransport::front_on_wire(Link& link) {
  Cell& cell = cell_at(link.outbox.front());
  const ConstBytes frame(cell.frame.data() + kFrameAt, cell.bytes);
  if (!link.seal) return frame;
  std::byte* out = (cell.readers == 1 ? cell.frame : link.sealed).data() + kFrameAt;
  if (out != frame.data()) std::memcpy(out, frame.data(), sizeof(Prefix));
  link.seal->seal(frame.first(sizeof(Prefix)), frame.subspan(sizeof(Prefix)), out + sizeof(Prefix));
  return {out, frame.size() + crypto::kTagBytes};
}

void TcpTransport::finish_front(Link& link) {
  --cell_at(link.outbox.front()).readers;
  link.outbox.pop();
  link.unsent = {};
}

// Marks a peer as gone and drops what is unsent. What the peer sent before may still be here: only
// arrived() ends the receiving side.
void TcpTransport::drop_outbox(Rank peer, const std::string& reason) {
  mark_gone(peer, reason);
  while (!at(peer).outbox.empty()) finish_front(at(peer));
}

std::optional<ConstBytes> TcpTransport::arrived(Rank peer) {
  Inbox& inbox = at(peer).inbox;
  do {
    if (const auto message = inbox.front(link_id(peer))) return message;
  } while (read_some(peer));
  return std::nullopt;
}

bool TcpTransport::read_some(Rank peer) {
  Link& link = at(peer);
  if (link.ended) return false;
  const Bytes room = link.inbox.room();
  const ssize_t got = ::recv(link.socket.get(), room.data(), room.size(), MSG_DONTWAIT);
  if (got < 0 && would_block(errno)) {
    if (link.seal) link.seal->prepare_to_open();  // what is to come, while nothing is here
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
  while (::epoll_wait(epoll_.get(), edges.data(), edges.size(), 0) == edges.size()) continue;
}

}  // namespace

extern constinit const Kind tcp_kind{
    .name = "tcp",
    .make = [](const Options& options) -> std::unique_ptr<Transport> {
      return std::make_unique<TcpTransport>(options);
    },
};

}  // namespace gradwire::transport
