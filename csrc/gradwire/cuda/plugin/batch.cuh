// Runs that one launch works on. Each is cut into tiles (elements that a thread block, or a warp,
// takes at once), which are numbered through all runs. The table is a kernel's argument: nothing is
// copied to the device, and a graph keeps it.
#pragma once

#include "gradwire/cuda/plugin/gpu.cuh"

namespace gradwire::cuda {

// A tile, and its run.
template <typename Each>
struct Tile {
  const Each& run;
  std::uint64_t number;      // in its run
  std::uint64_t first, all;  // the number through all runs of the run's first tile; the run's tiles
};

template <typename Each>
struct Batch {
  // A kernel takes 4 KB of arguments.
  static constexpr unsigned kMost =
      kMostRuns * sizeof(Each) < 3600 ? kMostRuns : 3600 / sizeof(Each);

  unsigned count = 0;
  std::uint32_t first[kMost + 1] = {};  // tiles before each run, and of all
  Each at[kMost] = {};

  // Calls body(tile) for each tile from `begin` on in steps of `step`; or for those of this block.
  template <typename Body>
  __device__ void each_tile(std::uint64_t begin, std::uint64_t step, Body body) const {
    for (std::uint64_t tile = begin; tile < tiles(); tile += step) at_tile(tile, body);
  }
  template <typename Body>
  __device__ void each_tile(Body body) const {
    each_tile(blockIdx.x, gridDim.x, body);
  }
  template <typename Body>
  __device__ void at_tile(std::uint64_t tile, Body body) const {
    const unsigned r = find(tile);
    body(Tile<Each>{at[r], tile - first[r], first[r], first[r + 1] - first[r]});
  }
  __host__ __device__ std::uint64_t tiles() const { return first[count]; }

  void add(const Each& each, std::uint64_t tiles) {
    at[count++] = each;
    first[count] = first[count - 1] + static_cast<std::uint32_t>(tiles);
  }

 private:
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
};

template <typename Given>
bool is_empty(const Given& run) {
  return run.n == 0;
}
inline bool is_empty(const FactoredMatrix&) { return false; }

// Calls start(batch) for all runs, as many at a time as it holds, and leaves out empty ones.
// make(run) returns what the kernel takes, tiles(run) into how many tiles a run is cut.
template <typename Given, typename Make, typename Tiles, typename Start>
Status in_batches(const Given* runs, int count, Make make, Tiles tiles, Start start) {
  Batch<decltype(make(*runs))> batch;
  for (int i = 0; i < count; ++i) {
    if (!is_empty(runs[i])) batch.add(make(runs[i]), tiles(runs[i]));
    if (batch.count < batch.kMost && i + 1 < count) continue;
    if (batch.count > 0)
      if (const Status status = start(batch); status != 0) return status;
    batch = {};
  }
  return 0;
}
// The same of kernels that take the runs as they are given.
template <typename Given, typename Tiles, typename Start>
Status in_batches(const Given* runs, int count, Tiles tiles, Start start) {
  return in_batches(runs, count, [](const Given& run) { return run; }, tiles, start);
}

}  // namespace gradwire::cuda
