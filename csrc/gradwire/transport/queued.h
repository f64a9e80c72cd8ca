// QueuedTransport: base of the transports that stage messages in cells of their own and send these
// when a socket or a device has room (tcp, rdma). A cell may wait for several peers.
#pragma once

#include <utility>
#include <vector>

#include "gradwire/transport/staged.h"

namespace gradwire::transport {

// A queue of cells, oldest first, of fixed capacity: it never allocates.
class CellQueue {
 public:
  explicit CellQueue(std::size_t capacity = 0) : cells_(capacity) {}
  bool empty() const noexcept { return count_ == 0; }
  std::size_t size() const noexcept { return count_; }
  int front() const noexcept { return cells_[first_]; }
  void push(int cell) noexcept { cells_[(first_ + count_++) % cells_.size()] = cell; }
  int pop() noexcept {
    --count_;
    return cells_[std::exchange(first_, (first_ + 1) % cells_.size())];
  }

 private:
  std::vector<int> cells_;
  std::size_t first_ = 0;
  std::size_t count_ = 0;
};

class QueuedTransport : public StagedTransport {
 public:
  QueuedTransport(std::string_view name, const LinkOptions& options);

  bool flush() final;
  bool is_flushed(Rank peer) const final { return unsent(peer) == 0; }

 protected:
  struct Cell {
    std::size_t bytes = 0;
    std::size_t readers = 0;  // peers to which it has yet to be sent
  };

  // Returns how many cells have yet to be sent to a peer, or are being sent.
  virtual std::size_t unsent(Rank peer) const { return outboxes_[at(peer)].size(); }
  // Sends as much of a peer's outbox as there is room for.
  virtual void push_out(Rank peer) = 0;
  // The same, after processing completions of what was sent before.
  virtual void push_on(Rank peer) = 0;

  Cell& cell_at(int cell) noexcept { return cells_[at(cell)]; }
  CellQueue& outbox(Rank peer) noexcept { return outboxes_[at(peer)]; }
  void release_cell(int cell) noexcept { --cell_at(cell).readers; }
  // Marks a peer as gone and drops what is unsent.
  void drop_outbox(Rank peer, const std::string& reason);
  // Queues a cell for the peers, and sends what there is room for.
  void queue(int cell, std::size_t bytes, std::span<const Rank> peers);

 private:
  bool has_most_unread(Rank peer) final;
  int find_room(std::span<const Rank> peers, std::size_t bytes) final;
  int first_free_cell() const noexcept;

  std::vector<Cell> cells_;
  std::vector<CellQueue> outboxes_;  // by peer
};

}  // namespace gradwire::transport
