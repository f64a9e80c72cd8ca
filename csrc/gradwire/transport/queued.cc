#include "gradwire/transport/queued.h"

#include <algorithm>

namespace gradwire::transport {

QueuedTransport::QueuedTransport(std::string_view name, const LinkOptions& options)
    : StagedTransport(name, options),
      cells_(at(options.messages)),
      outboxes_(at(options.size), CellQueue(cells_.size())) {}

bool QueuedTransport::flush() {
  for (Rank peer = 0; peer < options().size; ++peer) {
    if (is_flushed(peer)) continue;
    push_on(peer);
    throw_if_gone(peer);
  }
  for (Rank peer = 0; peer < options().size; ++peer)
    if (!is_flushed(peer)) return false;
  return true;
}

bool QueuedTransport::has_most_unread(Rank peer) {
  const auto most = at(options().messages_per_peer);
  if (unsent(peer) >= most) push_on(peer);
  return unsent(peer) >= most;
}

int QueuedTransport::find_room(std::span<const Rank>, std::size_t) {
  const int cell = first_free_cell();
  if (cell != kNoCell) return cell;
  for (Rank peer = 0; peer < options().size; ++peer) push_on(peer);
  return first_free_cell();
}

int QueuedTransport::first_free_cell() const noexcept {
  const auto free = std::ranges::find(cells_, std::size_t{0}, &Cell::readers);
  return free == cells_.end() ? kNoCell : static_cast<int>(free - cells_.begin());
}

void QueuedTransport::drop_outbox(Rank peer, const std::string& reason) {
  mark_gone(peer, reason);
  while (!outbox(peer).empty()) release_cell(outbox(peer).pop());
}

void QueuedTransport::queue(int cell, std::size_t bytes, std::span<const Rank> peers) {
  cell_at(cell) = {bytes, peers.size()};
  for (Rank peer : peers) outbox(peer).push(cell);
  for (Rank peer : peers) push_out(peer);
}

}  // namespace gradwire::transport
