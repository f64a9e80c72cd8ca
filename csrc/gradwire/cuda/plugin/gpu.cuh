// Selects what the plugin is compiled as: CUDA C++ or, where GRADWIRE_SIMULATED_CUDA is defined,
// C++ over a simulated device on the CPU (tests/simulated_cuda/), which runs the same kernels,
// thread by thread, and the same runtime calls.
//
// Arithmetic is that of the codecs (codec/): binary32, each operation rounded once. The CUDA build
// is compiled with -fmad=false -ftz=false -prec-div=true -prec-sqrt=true, so that plain + − · /
// round as IEEE 754 says.
#pragma once

#ifdef GRADWIRE_SIMULATED_CUDA
#include "simulated_cuda.h"
#else
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

#include <cstddef>
#include <cstdint>

#include "gradwire/cuda/api.h"

namespace gradwire::cuda {

inline constexpr unsigned kWarp = 32;
inline constexpr unsigned kAllLanes = 0xFFFFFFFFU;
// The most blocks of a launch; kernels take the remaining work in a grid-stride loop. And blocks of
// 1,024 threads with which a large GPU's multiprocessors are all busy. The simulated device has so
// few blocks that tests cover both sides.
#ifdef GRADWIRE_SIMULATED_CUDA
inline constexpr std::uint64_t kMostBlocks = 3;
inline constexpr std::uint64_t kEnoughBlocks = 2;
#else
inline constexpr std::uint64_t kMostBlocks = 1U << 16;
inline constexpr std::uint64_t kEnoughBlocks = 512;
#endif

// Enqueues a kernel on at most kMostBlocks blocks, without dynamic shared memory. Does nothing for
// 0 blocks.
template <typename... Parameters, typename... Arguments>
Status launch(void (*kernel)(Parameters...), std::uint64_t blocks, unsigned threads, Stream stream,
              Arguments... arguments) {
  if (blocks == 0) return 0;
  const auto grid = static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks);
#ifdef GRADWIRE_SIMULATED_CUDA
  return simulated::launch(stream, grid, threads, [=] { kernel(arguments...); });
#else
  // clang-format off
  kernel<<<grid, threads, 0, stream>>>(arguments...);
  // clang-format on
  return static_cast<Status>(cudaGetLastError());
#endif
}

constexpr std::uint64_t blocks_for(std::uint64_t n, std::uint64_t each) {
  return (n + each - 1) / each;
}

// Returns the thread's index in the whole grid.
__device__ inline std::uint64_t first_index() {
  return std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
}
__device__ inline std::uint64_t index_stride() { return std::uint64_t{gridDim.x} * blockDim.x; }

__device__ inline void set_flag(std::uint32_t* flags, std::uint32_t flag) {
  if (flags != nullptr) atomicOr(flags, flag);
}

}  // namespace gradwire::cuda
