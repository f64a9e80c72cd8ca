#include "gradwire/transport/memory/arena_transport.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "gradwire/base/error.h"

namespace gradwire::transport {

ArenaTransport::ArenaTransport(std::string_view name, const LinkOptions& options,
                               ArenaExchange exchange)
    : StagedTransport(name, options, /*has_doorbell=*/options.bells == nullptr),
      exchange_(exchange),
      messages_(at(options.messages)),
      unread_limit_(std::min(messages_, at(options.messages_per_peer))),
      own_(Arena::create(options)),
      links_(at(options.size)) {}

void ArenaTransport::introduce(const Stream& to, Rank peer) {
  if (!is_unix_socket(to.socket))
    throw InvalidArgument(describe(link_id(peer), "needs a Unix stream socket"));
  if (exchange_.give != nullptr) exchange_.give(to.socket, *own_, link_id(peer));
}

void ArenaTransport::connect(Rank peer, const WaitLimit& wait_limit) {
  const int socket = connection(peer).socket.get();
  link_to(peer).arena = exchange_.take(socket, own_, link_id(peer), options(), wait_limit);
  if (options().bells == nullptr)
    watch_descriptor(socket, EPOLLIN, peer);
  else
    connection(peer) = {};
}

std::size_t ArenaTransport::next(std::size_t position) const noexcept {
  return position + 1 == messages_ ? 0 : position + 1;
}

bool ArenaTransport::is_far(Rank peer) noexcept {
  return own_->far(peer).load(std::memory_order_relaxed) != 0;
}

// Returns a free cell. Cells are taken in turn, although fewer cells would be warmer in the cache:
// a line of the cell that was read last is in the reader's cache, from which it has to come back
// before it can be written; lines of cells that are reused only after a mebibyte or two have left
// it.
int ArenaTransport::free_cell() noexcept {
  for (std::size_t looked_at = 0; looked_at < messages_; ++looked_at) {
    const std::size_t cell = std::exchange(next_cell_, next(next_cell_));
    if (own_->readers(cell).load() == 0) return static_cast<int>(cell);
  }
  return kNoCell;
}

void ArenaTransport::limit_unread(int messages) noexcept {
  const std::size_t most = std::min(messages_, at(std::min(messages, options().messages_per_peer)));
  if (std::exchange(unread_limit_, most) == most) return;
  for (ArenaLink& link : links_) link.room = 0;
}

bool ArenaTransport::has_most_unread(Rank peer) {
  std::size_t& room = link_to(peer).room;
  if (room == 0) room = look_for_room(peer);
  if (room > 0) return false;
  want_room();
  room = look_for_room(peer);
  return room == 0;
}

// Returns how many more messages the peer may have; it may be fewer than there is room for. The
// peer reads in order, so one entry that it has read tells of all before it. Looks are rare: each
// costs a cache line on its way back.
std::size_t ArenaTransport::look_for_room(Rank peer) noexcept {
  for (std::size_t room : {unread_limit_ / 2 + 1, std::size_t{1}}) {
    const std::size_t before = link_to(peer).posted + messages_ - unread_limit_ + room - 1;
    if (own_->entry(peer, before % messages_).load() == Descriptor::kNone) return room;
  }
  return 0;
}

void ArenaTransport::want_room() noexcept {
  own_->wants_room().store(1);
  starved_ = true;
}

int ArenaTransport::find_room(std::span<const Rank> peers, std::size_t bytes) {
  copy_ = copy_cached;
  if (bytes <= kSmallMessage) return Descriptor::kInEntry;
  const bool far = std::ranges::any_of(peers, [this](Rank peer) { return is_far(peer); });
  if (far) copy_ = copy_streaming;
  const int cell = free_cell();
  if (cell != kNoCell) return cell;
  want_room();
  return free_cell();
}

std::byte* ArenaTransport::staging(int cell) noexcept {
  return cell == Descriptor::kInEntry ? small_.data() : own_->data(at(cell));
}

void ArenaTransport::post(int cell, std::size_t bytes, std::span<const Rank> peers) {
  const bool small = cell == Descriptor::kInEntry;
  if (!small)
    own_->readers(at(cell)).store(static_cast<std::uint32_t>(peers.size()),
                                  std::memory_order_relaxed);
  for (Rank peer : peers) {
    ArenaLink& link = link_to(peer);
    if (small) std::memcpy(own_->small(peer, link.posted), small_.data(), bytes);
    own_->entry(peer, link.posted).store(Descriptor::pack(cell, bytes));
    link.posted = next(link.posted);
    --link.room;
  }
  for (Rank peer : peers) wake(peer);
}

std::optional<ConstBytes> ArenaTransport::arrived(Rank peer) {
  ArenaLink& link = link_to(peer);
  const std::uint64_t word = link.arena->entry(options().rank, link.consumed).load();
  if (word == Descriptor::kNone) return std::nullopt;
  const Descriptor descriptor(word);
  const bool small = descriptor.cell == Descriptor::kInEntry;
  if ((!small && descriptor.cell >= messages_) ||
      descriptor.bytes > (small ? kSmallMessage : max_message()))
    throw_transport_error(link_id(peer),
                          str_cat("impossible descriptor in shared memory: cell ", descriptor.cell,
                                  ", ", descriptor.bytes, " bytes"));
  link.front = static_cast<int>(descriptor.cell);
  if (!small) time_line(link, link.arena->data(descriptor.cell));
  return ConstBytes{
      small ? link.arena->small(options().rank, link.consumed) : link.arena->data(descriptor.cell),
      descriptor.bytes};
}

// Times a line for LineTimes: rarely, since that costs some of the time that it measures, and not
// while this process sees the pages for the first time.
void ArenaTransport::time_line(ArenaLink& link, const std::byte* line) noexcept {
  constexpr unsigned kSeldom = 4;
  if (++link.cells % kSeldom != 0 || link.cells <= messages_ || !clock_.usable()) return;
  if (link.lines.add(clock_.first_look(line)))
    link.arena->far(options().rank).store(link.lines.far(), std::memory_order_relaxed);
}

// Even where other readers still need the cell, this makes room: this peer may get one more
// message.
void ArenaTransport::consume(Rank peer) {
  ArenaLink& link = link_to(peer);
  link.arena->entry(options().rank, link.consumed).store(Descriptor::kNone);
  link.consumed = next(link.consumed);
  if (link.front != Descriptor::kInEntry) link.arena->readers(at(link.front)).fetch_sub(1);
  if (link.arena->wants_room().load() != 0) wake(peer);
}

// Wakes the owner of the link's arena. A full socket has woken it already; a closed one is noticed
// by disarm().
void ArenaTransport::wake(Rank peer) noexcept {
  auto& sleeping = link_to(peer).arena->sleeping();
  if (sleeping.load() == 0 || sleeping.exchange(0) == 0) return;
  if (options().bells != nullptr) return options().bells->ring(peer);
  const char ring = 1;
  [[maybe_unused]] const ssize_t rung =
      ::send(connection(peer).socket.get(), &ring, sizeof ring, MSG_DONTWAIT | MSG_NOSIGNAL);
}

// Clears wants_room: the caller's last look, which follows, sets it again where needed.
void ArenaTransport::arm() {
  if (std::exchange(starved_, false)) own_->wants_room().store(0);
  own_->sleeping().store(1);
}

void ArenaTransport::disarm() {
  own_->sleeping().store(0);
  answer_bells();
}

void ArenaTransport::disconnected(Rank peer) {
  disconnect(peer);
  drop_unread(peer);
}

void ArenaTransport::end(Rank peer) noexcept {
  if (options().bells != nullptr && link_to(peer).arena) drop_unread(peer);
}

// Frees the cells that a peer which has ended did not read.
void ArenaTransport::drop_unread(Rank peer) noexcept {
  mark_gone(peer, "the peer closed it or died");
  for (std::size_t position = 0; position < messages_; ++position) {
    const std::uint64_t word = own_->entry(peer, position).exchange(Descriptor::kNone);
    const std::size_t cell = Descriptor(word).cell;
    if (word != Descriptor::kNone && cell < messages_) own_->readers(cell).fetch_sub(1);
  }
}

}  // namespace gradwire::transport
