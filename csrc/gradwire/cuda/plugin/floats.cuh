// Floats by their bits.
#pragma once

#include "gradwire/cuda/plugin/gpu.cuh"

namespace gradwire::cuda {

inline constexpr std::uint32_t kInfinityBits = 0x7F800000U;
inline constexpr std::uint32_t kNanBits = 0x7FC00000U;

// Of |x|: they compare as magnitudes do.
__device__ inline std::uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7FFFFFFFU; }

// A sum's NaN is the one that the CPU's kernels write.
__device__ inline float canonical(float x) { return x == x ? x : __uint_as_float(kNanBits); }

// Four that are loaded at once.
struct alignas(16) Four {
  float value[4];
};

}  // namespace gradwire::cuda
