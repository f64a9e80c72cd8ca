// Spans that one launch works on. Each is cut into tiles (elements that a thread block, or a warp,
// takes at once), which are numbered through all spans. The table is a kernel's argument: nothing
// is copied to the device, and a graph keeps it.
#pragma once

#include "gradwire/cuda/plugin/gpu.cuh"

namespace gradwire::cuda {

// A tile, and its span.
template <typename Each>
struct Tile {
  const Each& span;
  std::uint64_t number;  // in its span
  std::uint64_t first,
      all;  // the number through all spans of the span's first tile; the span's tiles
};

template <typename Each>
struct Batch {
  // A kernel takes 4 KB of arguments.
  static constexpr unsigned kMost =
      kMostSpans * sizeof(Each) < 3600 ? kMostSpans : 3600 / sizeof(Each);

  unsigned count = 0;
  std::uint32_t first[kMost + 1] = {};  // tiles before each span, and of all
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
  // Returns the span of a tile.
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
bool is_empty(const Given& span) {
  return span.n == 0;
}
inline bool is_empty(const GpuMatrix&) { return false; }

// Calls start(batch) for all spans, as many at a time as it holds, and leaves out empty ones.
// make(span) returns what the kernel takes, tiles(span) into how many tiles a span is cut.
template <typename Given, typename Make, typename Tiles, typename Start>
Status in_batches(const Given* spans, int count, Make make, Tiles tiles, Start start) {
  Batch<decltype(make(*spans))> batch;
  for (int i = 0; i < count; ++i) {
    if (!is_empty(spans[i])) batch.add(make(spans[i]), tiles(spans[i]));
    if (batch.count < batch.kMost && i + 1 < count) continue;
    if (batch.count > 0)
      if (const Status status = start(batch); status != 0) return status;
    batch = {};
  }
  return 0;
}
// The same of kernels that take the spans as they are given.
template <typename Given, typename Tiles, typename Start>
Status in_batches(const Given* spans, int count, Tiles tiles, Start start) {
  return in_batches(spans, count, [](const Given& span) { return span; }, tiles, start);
}

}  // namespace gradwire::cuda
