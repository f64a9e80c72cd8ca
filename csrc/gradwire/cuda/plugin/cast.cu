// The codecs fp16 and bf16 (codec/cast.cc defines them).
#include <bit>

#include "gradwire/cuda/plugin/cast.cuh"
#include "gradwire/cuda/plugin/functions.h"
#include "gradwire/cuda/plugin/run_feedback.cuh"
#include "gradwire/cuda/plugin/share.cuh"

namespace gradwire::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kCount = 8;  // elements of a thread
constexpr unsigned kTile = kThreads * kCount;

// The factor before the cast, a power of two, and its inverse. Values beyond the limit are sent as
// the limit.
struct Scale {
  float by, back;
  std::uint32_t limit;  // bits of the limit

  static Scale of(Cast cast, float scale) {
    const float back = 1.0F / scale;
    return {scale, back,
            std::bit_cast<std::uint32_t>((cast == Cast::kFp16 ? Fp16::kLargest : Bf16::kLargest) *
                                         back)};
  }
};

// Casts a finite value.
template <typename Half>
__device__ std::uint16_t cast(float v, Scale scale) {
  const std::uint32_t magnitude = magnitude_bits(v), sign = __float_as_uint(v) ^ magnitude;
  const std::uint32_t limited = magnitude < scale.limit ? magnitude : scale.limit;
  return Half::narrow_number(__uint_as_float(limited | sign) * scale.by);
}

template <typename Half, bool kFeedsBack, unsigned kWide>
__global__ void __launch_bounds__(kThreads)
    encode(const float* x, RunFeedback run_feedback, Scale scale, std::uint16_t* out,
           std::uint64_t n) {
  const Share<kThreads, kCount, kWide> share{threadIdx.x};
  Feedback feedback{};
  if constexpr (kFeedsBack) feedback = feedback_of(run_feedback);
  for (std::uint64_t begin = std::uint64_t{blockIdx.x} * kTile; begin < n;
       begin += std::uint64_t{gridDim.x} * kTile) {
    float v[kCount], e[kCount];
    std::uint16_t h[kCount];
    share.load(x + begin, n - begin, v);
    if constexpr (kFeedsBack) share.load(feedback.before + begin, n - begin, e);
    bool finite = true;
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) {
      if constexpr (kFeedsBack) v[i] = v[i] + e[i];
      finite = finite && is_finite(v[i]);
      h[i] = cast<Half>(v[i], scale);
      e[i] = v[i] - Half::widen_number(h[i]) * scale.back;
    }
    if (!finite) {
#pragma unroll
      for (unsigned i = 0; i < kCount; ++i) {
        if (is_finite(v[i])) continue;
        h[i] = narrow<Half>(kFeedsBack ? canonical(v[i]) : v[i]);
        e[i] = 0;
      }
    }
    share.store(out + begin, n - begin, h);
    if constexpr (kFeedsBack) share.store(feedback.after + begin, n - begin, e);
  }
}

template <typename Half, bool kAdd, unsigned kWide>
__global__ void __launch_bounds__(kThreads)
    decode(const std::uint16_t* in, Scale scale, float* y, std::uint64_t n, std::uint32_t* flags) {
  const Share<kThreads, kCount, kWide> share{threadIdx.x};
  bool finite = true;
  for (std::uint64_t begin = std::uint64_t{blockIdx.x} * kTile; begin < n;
       begin += std::uint64_t{gridDim.x} * kTile) {
    std::uint16_t h[kCount];
    float v[kCount];
    share.load(in + begin, n - begin, h);
    if constexpr (kAdd) share.load(y + begin, n - begin, v);
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) {
      float decoded = Half::widen_number(h[i]) * scale.back;
      finite = finite && is_finite(decoded);
      if (decoded != decoded) decoded = Half::widen_nan(h[i]);
      v[i] = kAdd ? canonical(v[i] + decoded) : decoded;
    }
    share.store(y + begin, n - begin, v);
  }
  if (__syncthreads_or(!finite) && threadIdx.x == 0) set_flag(flags, kNotFinite);
}

template <typename Half, bool kFeedsBack>
Status start_encode(const float* x, const RunFeedback& run_feedback, Scale scale, std::byte* out,
                    std::uint64_t n, Stream stream) {
  const bool wide = all_aligned(x, out) && is_aligned(run_feedback);
  return launch(wide ? encode<Half, kFeedsBack, 4> : encode<Half, kFeedsBack, 1>,
                blocks_for(n, kTile), kThreads, stream, x, run_feedback, scale,
                reinterpret_cast<std::uint16_t*>(out), n);
}

template <typename Half>
Status start_encode(const float* x, const RunFeedback& run_feedback, Scale scale, std::byte* out,
                    std::uint64_t n, Stream stream) {
  return keeps_errors(run_feedback)
             ? start_encode<Half, true>(x, run_feedback, scale, out, n, stream)
             : start_encode<Half, false>(x, run_feedback, scale, out, n, stream);
}

Status cast_encode(Cast cast, const float* x, RunFeedback run_feedback, float scale, std::byte* out,
                   std::uint64_t n, Stream stream) {
  const Scale by = Scale::of(cast, scale);
  return cast == Cast::kFp16 ? start_encode<Fp16>(x, run_feedback, by, out, n, stream)
                             : start_encode<Bf16>(x, run_feedback, by, out, n, stream);
}

template <typename Half, bool kAdd>
Status start_decode(const std::byte* in, Scale scale, float* y, std::uint64_t n,
                    std::uint32_t* flags, Stream stream) {
  return launch(all_aligned(in, y) ? decode<Half, kAdd, 4> : decode<Half, kAdd, 1>,
                blocks_for(n, kTile), kThreads, stream, reinterpret_cast<const std::uint16_t*>(in),
                scale, y, n, flags);
}

template <typename Half>
Status start_decode(const std::byte* in, Scale scale, float* y, std::uint64_t n, bool add,
                    std::uint32_t* flags, Stream stream) {
  return add ? start_decode<Half, true>(in, scale, y, n, flags, stream)
             : start_decode<Half, false>(in, scale, y, n, flags, stream);
}

Status cast_decode(Cast cast, const std::byte* in, float scale, float* y, std::uint64_t n, bool add,
                   std::uint32_t* flags, Stream stream) {
  const Scale by = Scale::of(cast, scale);
  return cast == Cast::kFp16 ? start_decode<Fp16>(in, by, y, n, add, flags, stream)
                             : start_decode<Bf16>(in, by, y, n, add, flags, stream);
}

}  // namespace

void fill_cast(Api& api) {
  api.cast_encode = cast_encode;
  api.cast_decode = cast_decode;
}

}  // namespace gradwire::cuda
