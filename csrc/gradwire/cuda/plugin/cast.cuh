// float32 to a 16-bit float and back (codec/simd_cast.h). Of NaN a GPU's own conversions keep
// nothing; here it keeps its sign and top payload bits, and becomes quiet.
#pragma once

#include "gradwire/cuda/plugin/floats.cuh"

namespace gradwire::cuda {

struct Fp16 {
  static constexpr float kLargest = 65504.0F;

  // To nearest even, overflow to Inf.
  __device__ static std::uint16_t narrow(float x) {
    const std::uint32_t u = __float_as_uint(x);
    const auto nan = static_cast<std::uint16_t>((u >> 16 & 0x8000U) | 0x7E00U | (u >> 13 & 0x3FFU));
    return x == x ? __half_as_ushort(__float2half_rn(x)) : nan;
  }
  __device__ static float widen(std::uint16_t h) {
    const std::uint32_t nan = (h & 0x8000U) << 16 | kNanBits | (h & 0x3FFU) << 13;
    const bool is_nan = (h & 0x7FFFU) > 0x7C00U;
    return is_nan ? __uint_as_float(nan) : __half2float(__ushort_as_half(h));
  }
};

struct Bf16 {
  static constexpr float kLargest = 0x1.FEp127F;

  __device__ static std::uint16_t narrow(float x) {
    const std::uint32_t u = __float_as_uint(x);
    const std::uint32_t rounded = u + 0x7FFFU + (u >> 16 & 1U);
    return static_cast<std::uint16_t>((x == x ? rounded : u | 0x400000U) >> 16);
  }
  // NaN as it is, quiet or not.
  __device__ static float widen(std::uint16_t h) {
    return __uint_as_float(static_cast<std::uint32_t>(h) << 16);
  }
};

}  // namespace gradwire::cuda
