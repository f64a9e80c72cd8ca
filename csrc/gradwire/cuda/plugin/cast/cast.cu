// The codecs fp16 and bf16 (codec/cast.cc defines them).
#include "gradwire/cuda/plugin/batch.cuh"
#include "gradwire/cuda/plugin/cast/cast_codec.cuh"
#include "gradwire/cuda/plugin/functions.h"
#include "gradwire/cuda/plugin/share.cuh"
#include "gradwire/cuda/plugin/span_feedback.cuh"

namespace gradwire::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kCount = 8;  // elements of a thread
constexpr unsigned kTile = kThreads * kCount;

// How: Encoding or Decoding.
template <typename How>
struct CastStage {
  Batch<GpuSpan> spans;
  CastScale scale;
  How how;
  std::uint32_t* flags;
};

// Returns a span's payload in a message; `place` is where it begins there.
__device__ const std::uint16_t* payload(const GpuPayloads& of, std::uint64_t place, int message) {
  return reinterpret_cast<const std::uint16_t*>(of.first + place + of.offset(message));
}

__device__ bool are_aligned(const GpuPayloads& of, std::uint64_t place) {
  return of.count == 0 || is_aligned(of.first + place);
}

// Adds payloads from number `first` on, one after the other, to the thread's elements of a tile.
// Returns whether all of them were finite.
template <typename Half, unsigned kWide>
__device__ bool add_payloads(const GpuPayloads& of, std::uint64_t place, CastScale scale,
                             std::uint64_t begin, std::uint64_t left, float (&v)[kCount],
                             int first = 0) {
  const Share<kThreads, kCount, kWide> share{threadIdx.x};
  bool finite = true;
  for (int j = first; j < of.count; ++j) {
    std::uint16_t h[kCount];
    share.load(payload(of, place, j) + begin, left, h);
    const bool good = add_values<Half>(scale, h, v);
    finite = finite && good;
  }
  return finite;
}

// Calls tile(span, its first element) for each tile of the block, and sets kNotFinite where one of
// them returns false.
template <typename How, typename Visit>
__device__ void each_tile(const CastStage<How>& of, Visit visit) {
  bool good = true;
  of.spans.each_tile([&](Tile<GpuSpan> tile) {
    const bool is_good = visit(tile.span, tile.number * kTile);
    good = good && is_good;
  });
  if (__syncthreads_or(!good) && threadIdx.x == 0) set_flag(of.flags, kNotFinite);
}

std::uint64_t tiles_of(const GpuSpan& span) { return blocks_for(span.n, kTile); }

// ---- Encoding ----------------------------------------------------------------------------------

// Encodes a tile. Returns whether all that was decoded is finite.
template <typename Half, bool kFeedsBack, unsigned kWide>
__device__ bool encode_tile(const CastStage<Encoding>& of, const GpuSpan& span,
                            std::uint64_t begin) {
  const Share<kThreads, kCount, kWide> share{threadIdx.x};
  const std::uint64_t left = span.n - begin;
  float v[kCount], e[kCount];
  std::uint16_t h[kCount];
  Residuals feedback{};
  if constexpr (kFeedsBack) feedback = feedback_of(span.span_feedback);
  share.load(span.x + begin, left, v);
  if constexpr (kFeedsBack) share.load(feedback.before + begin, left, e);
  const bool good =
      add_payloads<Half, kWide>(of.how.received, span.received, of.scale, begin, left, v);
  encode_values<Half>(of.scale, kFeedsBack, v, e, h);
  share.store(reinterpret_cast<std::uint16_t*>(of.how.out + span.payload) + begin, left, h);
  if constexpr (kFeedsBack) share.store(feedback.after + begin, left, e);
  if (!of.how.finishes) return good;
  const bool finite = decode_values<Half>(of.scale, h, of.how.factor, v);
  share.store(span.y + begin, left, v);
  return good && finite;
}

template <typename Half, bool kFeedsBack>
__global__ void __launch_bounds__(kThreads) encode(const __grid_constant__ CastStage<Encoding> of) {
  each_tile(of, [&](const GpuSpan& span, std::uint64_t begin) {
    const bool wide = all_aligned(span.x, of.how.out + span.payload) &&
                      are_aligned(of.how.received, span.received) &&
                      (!of.how.finishes || is_aligned(span.y)) && is_aligned(span.span_feedback);
    return wide ? encode_tile<Half, kFeedsBack, 4>(of, span, begin)
                : encode_tile<Half, kFeedsBack, 1>(of, span, begin);
  });
}

template <typename Half>
Status start_encode(const CastStage<Encoding>& of, Stream stream) {
  return launch(
      keeps_errors(of.spans.at[0].span_feedback) ? encode<Half, true> : encode<Half, false>,
      of.spans.tiles(), kThreads, stream, of);
}

Status cast_encode_spans(CastType cast, float scale, const GpuSpan* spans, int count,
                         const Encoding& how, std::uint32_t* flags, Stream stream) {
  return in_batches(spans, count, tiles_of, [&](const Batch<GpuSpan>& batch) {
    const CastStage<Encoding> of{batch, CastScale::of(cast, scale), how, flags};
    return cast == CastType::kFp16 ? start_encode<GpuFp16>(of, stream)
                                   : start_encode<GpuBf16>(of, stream);
  });
}

// ---- Decoding ----------------------------------------------------------------------------------

template <typename Half, unsigned kWide>
__device__ bool decode_tile(const CastStage<Decoding>& of, const GpuSpan& span,
                            std::uint64_t begin) {
  const Share<kThreads, kCount, kWide> share{threadIdx.x};
  const std::uint64_t left = span.n - begin;
  const GpuPayloads& payloads = of.how.payloads;
  float v[kCount];
  bool good = true;
  if (of.how.adds) {
    share.load(span.y + begin, left, v);
    good = add_payloads<Half, kWide>(payloads, span.payload, of.scale, begin, left, v);
  } else {
    std::uint16_t h[kCount];
    share.load(payload(payloads, span.payload, 0) + begin, left, h);
    good = decode_values<Half>(of.scale, h, 1, v);
    good = add_payloads<Half, kWide>(payloads, span.payload, of.scale, begin, left, v, 1) && good;
#pragma unroll
    for (float& each : v) each = times(each, of.how.factor);
  }
  share.store(span.y + begin, left, v);
  return good;
}

template <typename Half>
__global__ void __launch_bounds__(kThreads) decode(const __grid_constant__ CastStage<Decoding> of) {
  each_tile(of, [&](const GpuSpan& span, std::uint64_t begin) {
    const bool wide = are_aligned(of.how.payloads, span.payload) && is_aligned(span.y);
    return wide ? decode_tile<Half, 4>(of, span, begin) : decode_tile<Half, 1>(of, span, begin);
  });
}

Status cast_decode_spans(CastType cast, float scale, const GpuSpan* spans, int count,
                         const Decoding& how, std::uint32_t* flags, Stream stream) {
  return in_batches(spans, count, tiles_of, [&](const Batch<GpuSpan>& batch) {
    const CastStage<Decoding> of{batch, CastScale::of(cast, scale), how, flags};
    return launch(cast == CastType::kFp16 ? decode<GpuFp16> : decode<GpuBf16>, batch.tiles(),
                  kThreads, stream, of);
  });
}

}  // namespace

void fill_cast(Api& api) {
  api.cast_encode_spans = cast_encode_spans;
  api.cast_decode_spans = cast_decode_spans;
}

}  // namespace gradwire::cuda
