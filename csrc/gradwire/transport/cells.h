// Cells: each is the staging memory of one message. A queue holds those that a peer has yet to be
// sent.
#pragma once

#include <cstddef>
#include <vector>

namespace gradwire::transport {

inline constexpr std::size_t kLine = 64;

// The cells that a peer has yet to be sent, oldest first; there are never more than cells.
class CellQueue {
 public:
  explicit CellQueue(std::size_t capacity = 0) : cells_(capacity) {}
  bool empty() const noexcept { return count_ == 0; }
  std::size_t size() const noexcept { return count_; }
  int front() const noexcept { return cells_[first_]; }
  void push(int cell) noexcept { cells_[(first_ + count_++) % cells_.size()] = cell; }
  void pop() noexcept {
    first_ = (first_ + 1) % cells_.size();
    --count_;
  }

 private:
  std::vector<int> cells_;
  std::size_t first_ = 0;
  std::size_t count_ = 0;
};

}  // namespace gradwire::transport
