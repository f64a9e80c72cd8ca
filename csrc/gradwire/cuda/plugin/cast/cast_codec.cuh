// Values of the codecs fp16 and bf16 (codec/cast.cc).
#pragma once

#include <bit>

#include "gradwire/cuda/plugin/cast/cast.cuh"

namespace gradwire::cuda {

// The factor before the cast, a power of two, and its inverse. Values beyond the limit are sent as
// the limit.
struct CastScale {
  float by, back;
  std::uint32_t limit;  // bits of the limit

  static CastScale of(CastType cast, float scale) {
    const float back = 1.0F / scale;
    return {scale, back,
            std::bit_cast<std::uint32_t>(
                (cast == CastType::kFp16 ? GpuFp16::kLargest : GpuBf16::kLargest) * back)};
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

// ---- A thread's values --------------------------------------------------------------------------

// Encodes v, which gets the residual e first if it `keeps` errors; e becomes what is lost.
template <typename Half, unsigned kCount>
__device__ void encode_values(CastScale scale, bool keeps, float (&v)[kCount], float (&e)[kCount],
                              std::uint16_t (&h)[kCount]) {
  bool finite = true;
#pragma unroll
  for (unsigned i = 0; i < kCount; ++i) {
    if (keeps) v[i] = v[i] + e[i];
    finite = finite && is_finite(v[i]);
    h[i] = cast<Half>(v[i], scale);
    e[i] = v[i] - Half::widen_number(h[i]) * scale.back;
  }
  if (finite) return;
#pragma unroll
  for (unsigned i = 0; i < kCount; ++i) {
    if (is_finite(v[i])) continue;
    h[i] = narrow<Half>(keeps ? canonical(v[i]) : v[i]);
    e[i] = 0;
  }
}

// Both return whether all of h decodes to finite values.
template <typename Half, unsigned kCount>
__device__ bool add_values(CastScale scale, const std::uint16_t (&h)[kCount], float (&v)[kCount]) {
  bool finite = true;
#pragma unroll
  for (unsigned i = 0; i < kCount; ++i) {
    const float each = decoded<Half>(h[i], scale);
    finite = finite && is_finite(each);
    v[i] = canonical(v[i] + each);
  }
  return finite;
}
// v := what h decodes to, times factor.
template <typename Half, unsigned kCount>
__device__ bool decode_values(CastScale scale, const std::uint16_t (&h)[kCount], float factor,
                              float (&v)[kCount]) {
  bool finite = true;
#pragma unroll
  for (unsigned i = 0; i < kCount; ++i) {
    const float each = decoded<Half>(h[i], scale);
    finite = finite && is_finite(each);
    v[i] = times(each, factor);
  }
  return finite;
}

}  // namespace gradwire::cuda
