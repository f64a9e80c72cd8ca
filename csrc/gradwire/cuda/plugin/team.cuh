// A team is the threads that work on one unit of elements: one warp, or all warps of a block.
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
    return over_warps(__reduce_max_sync(kAllLanes, mine), Larger{}).all;
  }
  __device__ static std::uint32_t sum(std::uint32_t mine) {
    return over_warps(__reduce_add_sync(kAllLanes, mine), Plus{}).all;
  }

  template <typename T, typename Join>
  __device__ static Scanned<T> scan(T mine, Join join) {
    T upto = mine;
    for (unsigned by = 1; by < kWarp; by *= 2) {
      const T other = __shfl_up_sync(kAllLanes, upto, by);
      if (lane() >= by) upto = join(upto, other);
    }
    const T before = __shfl_up_sync(kAllLanes, upto, 1);
    const Scanned<T> warps = over_warps(__shfl_sync(kAllLanes, upto, kWarp - 1), join);
    return {lane() == 0 ? warps.before : join(warps.before, before), warps.all};
  }

 private:
  // Scans over the warps of the team; all lanes of a warp pass the same value.
  template <typename T, typename Join>
  __device__ static Scanned<T> over_warps(T of_warp, Join join) {
    if constexpr (kAlone) {
      return {0, of_warp};
    } else {
      __shared__ T values[kWarp];
      if (lane() == 0) values[warp()] = of_warp;
      __syncthreads();
      Scanned<T> found{0, 0};
      for (unsigned w = 0; w < warps(); ++w) {
        if (w < warp()) found.before = join(found.before, values[w]);
        found.all = join(found.all, values[w]);
      }
      __syncthreads();  // before `values` is written again
      return found;
    }
  }
};

}  // namespace gradwire::cuda
