// Reductions and scans over a warp or a thread block, all of whose threads must call them.
#pragma once

#include "gradwire/cuda/plugin/gpu.cuh"

namespace gradwire::cuda {

// The results of a scan: the joined values of the threads before this one, and of all threads.
template <typename T>
struct Scanned {
  T before, all;
};

struct Plus {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Larger {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};

inline constexpr unsigned kBlockWarps = 32;  // at most

// Returns the largest `mine` of the block.
__device__ inline std::uint32_t block_largest(std::uint32_t mine) {
  __shared__ std::uint32_t of_warp[kBlockWarps];
  const std::uint32_t largest = __reduce_max_sync(kAllLanes, mine);
  __syncthreads();  // all threads have read the last call's values
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = largest;
  __syncthreads();
  std::uint32_t most = 0;
  for (unsigned warp = 0; warp < blockDim.x / kWarp; ++warp) most = Larger{}(most, of_warp[warp]);
  return most;
}

// Returns the inclusive scan over a warp: the joined values of the lanes up to this one.
template <typename T, typename Join>
__device__ T warp_scan(T mine, Join join) {
  for (unsigned by = 1; by < kWarp; by *= 2) {
    const T other = __shfl_up_sync(kAllLanes, mine, by);
    if (threadIdx.x % kWarp >= by) mine = join(other, mine);
  }
  return mine;
}

// Scans over the block. join(earlier, later) is associative, and `neutral` is its identity.
template <typename T, typename Join>
__device__ Scanned<T> block_scan(T mine, T neutral, Join join) {
  __shared__ T of_warp[kBlockWarps];
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const T through = warp_scan(mine, join);
  const T before = __shfl_up_sync(kAllLanes, through, 1);
  __syncthreads();  // all threads have read the last call's values
  if (lane == kWarp - 1) of_warp[warp] = through;
  __syncthreads();
  const T warps = warp_scan(lane < blockDim.x / kWarp ? of_warp[lane] : neutral, join);
  const T lower = __shfl_sync(kAllLanes, warps, (warp + kWarp - 1) % kWarp);
  const T all = __shfl_sync(kAllLanes, warps, kWarp - 1);
  const T of_lanes = lane == 0 ? neutral : before;
  return {warp == 0 ? of_lanes : join(lower, of_lanes), all};
}

template <typename T>
__device__ Scanned<T> block_sums(T mine) {
  return block_scan(mine, T{0}, Plus{});
}

}  // namespace gradwire::cuda
