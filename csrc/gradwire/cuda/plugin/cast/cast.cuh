// Converts float32 to 16-bit floats and back (codec/simd/simd_cast.h). CUDA's own conversions lose
// a NaN's bits; these keep its sign and its top payload bits, and make it quiet.
#pragma once

#include "gradwire/cuda/plugin/floats.cuh"

namespace gradwire::cuda {

struct GpuFp16 {
  static constexpr float kLargest = 65504.0F;
  static constexpr std::uint16_t kNan = 0x7E00;

  // Rounds numbers and Inf to nearest even; overflow gives Inf. A NaN becomes an unspecified NaN.
  __device__ static std::uint16_t narrow_number(float x) {
    return __half_as_ushort(__float2half_rn(x));
  }
  __device__ static float widen_number(std::uint16_t h) {
    return __half2float(__ushort_as_half(h));
  }

  __device__ static std::uint16_t narrow_nan(float x) {
    const std::uint32_t u = __float_as_uint(x);
    return static_cast<std::uint16_t>((u >> 16 & 0x8000U) | kNan | (u >> 13 & 0x3FFU));
  }
  __device__ static float widen_nan(std::uint16_t h) {
    return __uint_as_float((h & 0x8000U) << 16 | kNanBits | (h & 0x3FFU) << 13);
  }
};

struct GpuBf16 {
  static constexpr float kLargest = 0x1.FEp127F;
  static constexpr std::uint16_t kNan = 0x7FC0;

  __device__ static std::uint16_t narrow_number(float x) {
    const std::uint32_t u = __float_as_uint(x);
    return static_cast<std::uint16_t>((u + 0x7FFFU + (u >> 16 & 1U)) >> 16);
  }
  __device__ static float widen_number(std::uint16_t h) {
    return __uint_as_float(static_cast<std::uint32_t>(h) << 16);
  }

  __device__ static std::uint16_t narrow_nan(float x) {
    return static_cast<std::uint16_t>((__float_as_uint(x) | 0x400000U) >> 16);
  }
  __device__ static float widen_nan(std::uint16_t h) {
    return __uint_as_float(static_cast<std::uint32_t>(h) << 16 | 0x400000U);
  }
};

template <typename Half>
__device__ std::uint16_t narrow(float x) {
  return x == x ? Half::narrow_number(x) : Half::narrow_nan(x);
}
template <typename Half>
__device__ float widen(std::uint16_t h) {
  const float x = Half::widen_number(h);
  return x == x ? x : Half::widen_nan(h);
}

}  // namespace gradwire::cuda
