// Tests and constants of floats by their bits.
#pragma once

#include <type_traits>

#include "gradwire/cuda/plugin/gpu.cuh"

namespace gradwire::cuda {

inline constexpr std::uint32_t kInfinityBits = 0x7F800000U;
inline constexpr std::uint32_t kNanBits = 0x7FC00000U;

// Returns the bits of |x|, which compare as magnitudes do.
__device__ inline std::uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7FFFFFFFU; }

__device__ inline bool is_finite(float x) { return magnitude_bits(x) < kInfinityBits; }
__device__ inline bool is_negative(float x) { return __float_as_uint(x) >> 31 != 0; }

// Returns the NaN that the CPU's kernels write.
template <typename T>
__device__ T quiet_nan() {
  if constexpr (sizeof(T) == sizeof(float))
    return __uint_as_float(kNanBits);
  else
    return __longlong_as_double(0x7FF8000000000000);
}

// Returns x, or quiet_nan() where x is any NaN.
template <typename T>
__device__ T canonical(T x) {
  if constexpr (std::is_floating_point_v<T>) return x == x ? x : quiet_nan<T>();
  return x;
}

// Averaging makes a NaN canonical, as a pass of its own would.
__device__ inline float times(float v, float factor) {
  return factor == 1 ? v : canonical(v * factor);
}

// Four floats that are loaded at once.
struct alignas(16) Four {
  float value[4];
};

}  // namespace gradwire::cuda
