// Runs that one launch works on. Each is cut into tiles (elements that a thread block, or a warp,
// takes at once), which are numbered through all runs. The table is a kernel's argument: nothing is
// copied to the device, and a graph keeps it.
#pragma once

#include <type_traits>

#include "gradwire/cuda/plugin/gpu.cuh"

namespace gradwire::cuda {

template <typename Each>
struct Batch {
  unsigned count = 0;
  std::uint32_t first[kMostRuns + 1] = {};  // tiles before each run, and of all
  Each at[kMostRuns] = {};

  // Returns the run of a tile.
  __device__ unsigned find(std::uint64_t tile) const {
    unsigned low = 0, high = count;
    while (high - low > 1) {
      const unsigned middle = (low + high) / 2;
      if (first[middle] <= tile)
        low = middle;
      else
        high = middle;
    }
    return low;
  }
  __host__ __device__ std::uint64_t tiles() const { return first[count]; }

  void add(const Each& each, std::uint64_t tiles) {
    at[count++] = each;
    first[count] = first[count - 1] + static_cast<std::uint32_t>(tiles);
  }
};

template <typename Given>
bool is_empty(const Given& run) {
  return run.n == 0;
}
inline bool is_empty(const FactoredMatrix&) { return false; }

// Calls start(batch) for all runs, kMostRuns at a time, and leaves out empty ones. make(run)
// returns what the kernel takes, tiles(run) into how many tiles a run is cut.
template <typename Given, typename Make, typename Tiles, typename Start>
Status in_batches(const Given* runs, int count, Make make, Tiles tiles, Start start) {
  static_assert(sizeof(Batch<decltype(make(*runs))>) < 3900, "a kernel takes 4 KB of arguments");
  Batch<decltype(make(*runs))> batch;
  for (int i = 0; i < count; ++i) {
    if (!is_empty(runs[i])) batch.add(make(runs[i]), tiles(runs[i]));
    if (batch.count < kMostRuns && i + 1 < count) continue;
    if (batch.count > 0)
      if (const Status status = start(batch); status != 0) return status;
    batch = {};
  }
  return 0;
}

}  // namespace gradwire::cuda
