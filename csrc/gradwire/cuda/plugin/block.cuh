// What the threads of a block find out together. All of them call.
#pragma once

#include "gradwire/cuda/plugin/gpu.cuh"

namespace gradwire::cuda {

inline constexpr unsigned kMostWarps = 32;  // of a block

// The largest of what they give.
__device__ inline std::uint32_t block_largest(std::uint32_t mine) {
  __shared__ std::uint32_t of_warp[kMostWarps];
  const std::uint32_t largest = __reduce_max_sync(kAllLanes, mine);
  __syncthreads();  // nobody reads those of the last call
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = largest;
  __syncthreads();
  std::uint32_t most = 0;
  for (unsigned warp = 0; warp < blockDim.x / kWarp; ++warp)
    most = of_warp[warp] > most ? of_warp[warp] : most;
  return most;
}

}  // namespace gradwire::cuda
