// A team is the threads that work on one unit of elements: one warp, or all warps of a block.
#pragma once

#include "gradwire/cuda/plugin/block.cuh"

namespace gradwire::cuda {

// All threads of a team call its functions together. Reductions and scans begin with 0.
template <bool kAlone>
struct Team {
  static constexpr bool kOneWarp = kAlone;

  __device__ static unsigned lane() { return threadIdx.x % kWarp; }
  __device__ static unsigned rank() { return kAlone ? lane() : threadIdx.x; }
  __device__ static unsigned size() { return kAlone ? kWarp : blockDim.x; }
  __device__ static unsigned warp() { return kAlone ? 0 : threadIdx.x / kWarp; }
  __device__ static unsigned warps() { return kAlone ? 1 : blockDim.x / kWarp; }

  // The team's number in the grid, and how many teams there are. They take turns at the units.
  __device__ static std::uint64_t number() { return kAlone ? first_index() / kWarp : blockIdx.x; }
  __device__ static std::uint64_t count() { return kAlone ? index_stride() / kWarp : gridDim.x; }

  __device__ static void sync() {
    if constexpr (kAlone)
      __syncwarp();
    else
      __syncthreads();
  }
  __device__ static bool any(bool predicate) {
    if constexpr (kAlone)
      return __any_sync(kAllLanes, predicate) != 0;
    else
      return __syncthreads_or(predicate) != 0;
  }

  __device__ static std::uint32_t largest(std::uint32_t mine) {
    if constexpr (kAlone)
      return __reduce_max_sync(kAllLanes, mine);
    else
      return block_largest(mine);
  }
  __device__ static std::uint32_t sum(std::uint32_t mine) {
    if constexpr (kAlone)
      return __reduce_add_sync(kAllLanes, mine);
    else
      return block_sums(mine).all;
  }

  template <typename T, typename Join>
  __device__ static Scanned<T> scan(T mine, Join join) {
    if constexpr (kAlone) {
      const T upto = warp_scan(mine, join), before = __shfl_up_sync(kAllLanes, upto, 1);
      return {lane() == 0 ? 0 : before, __shfl_sync(kAllLanes, upto, kWarp - 1)};
    } else {
      return block_scan(mine, T{0}, join);
    }
  }
};

}  // namespace gradwire::cuda
