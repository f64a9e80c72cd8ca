// Values of the codecs fp16 and bf16 (codec/cast.cc).
#pragma once

#include <bit>

#include "gradwire/cuda/plugin/cast.cuh"

namespace gradwire::cuda {

// The factor before the cast, a power of two, and its inverse. Values beyond the limit are sent as
// the limit.
struct CastScale {
  float by, back;
  std::uint32_t limit;  // bits of the limit

  static CastScale of(Cast cast, float scale) {
    const float back = 1.0F / scale;
    return {scale, back,
            std::bit_cast<std::uint32_t>((cast == Cast::kFp16 ? Fp16::kLargest : Bf16::kLargest) *
                                         back)};
  }
};

// Casts a finite value.
template <typename Half>
__device__ std::uint16_t cast(float v, CastScale scale) {
  const std::uint32_t magnitude = magnitude_bits(v), sign = __float_as_uint(v) ^ magnitude;
  const std::uint32_t limited = magnitude < scale.limit ? magnitude : scale.limit;
  return Half::narrow_number(__uint_as_float(limited | sign) * scale.by);
}

template <typename Half>
__device__ float decoded(std::uint16_t h, CastScale scale) {
  const float v = Half::widen_number(h) * scale.back;
  return v == v ? v : Half::widen_nan(h);
}

}  // namespace gradwire::cuda
