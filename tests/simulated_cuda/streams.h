// What kernels.cc and streams.cc share.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <random>

namespace simulated {

std::mt19937_64& random_bits();  // under the device's lock
void run_grid(unsigned blocks, unsigned threads, const std::function<void()>& thread);

// A kernel that waits for others: all its blocks are there at once, and kernels of other streams
// run in between.
class WaitingGrid {
 public:
  enum class State { kOver, kMoved, kWaits };
  WaitingGrid(unsigned blocks, unsigned threads, std::function<void()> thread);
  ~WaitingGrid();
  // Runs each block until it waits. kWaits: none had anything to do.
  State go_on();

 private:
  struct Blocks;
  unsigned blocks_, threads_;
  std::function<void()> thread_;
  std::unique_ptr<Blocks> begun_;
};

// Memory that other processes can map (shared_memory.cc); under the device's lock.
void* allocate_pages(std::size_t bytes);
void free_pages(void* address);
std::mutex& device_lock();

}  // namespace simulated
