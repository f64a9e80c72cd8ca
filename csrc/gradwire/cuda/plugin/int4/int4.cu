// int4: launches over spans (int4.cuh has the units).
#include "gradwire/cuda/plugin/batch.cuh"
#include "gradwire/cuda/plugin/functions.h"
#include "gradwire/cuda/plugin/int4/int4.cuh"
#include "gradwire/cuda/plugin/span_feedback.cuh"
#include "gradwire/cuda/plugin/team.cuh"

namespace gradwire::cuda {
namespace {

using namespace int4;

constexpr unsigned kThreads = 256;
constexpr unsigned kWarps = kThreads / kWarp;
using Its = Team<true>;

// How: Encoding or Decoding.
template <typename How>
struct Int4Stage {
  Batch<GpuSpan> spans;
  std::uint64_t block;
  How how;
  std::uint32_t* flags;

  __device__ std::uint64_t payload_bytes(std::uint64_t units) const {
    return units * (bytes_of_scales(kUnit, block) + kUnit / 2);
  }
};

std::uint64_t units_of(const GpuSpan& span) { return blocks_for(span.n, kUnit); }

__device__ std::uint64_t length_of(const GpuSpan& span, std::uint64_t first) {
  return span.n - first < kUnit ? span.n - first : kUnit;
}

// ---- Encoding ----------------------------------------------------------------------------------

template <bool kFeedsBack, unsigned kWide>
__device__ void encode_unit(const Int4Stage<Encoding>& of, const GpuSpan& span,
                            std::uint64_t number, const Int8Rounding& rounding,
                            const Levels& levels) {
  Residuals feedback{};
  if constexpr (kFeedsBack) feedback = feedback_of(span.span_feedback);
  const std::uint64_t key =
      run_key(rounding.seed, span.call, kFeedsBack ? span.span_feedback.key_state->calls : 0);
  const std::uint64_t first = number * kUnit, payload = of.payload_bytes(number);
  const StridedPayloads received{of.how.received, span.received + payload};
  const UnitEncoder<kFeedsBack, kWide, StridedPayloads> here{
      span.x + first,
      kFeedsBack ? feedback.before + first : nullptr,
      kFeedsBack ? feedback.after + first : nullptr,
      of.how.finishes ? span.y + first : nullptr,
      of.how.out + span.payload + payload,
      length_of(span, first),
      of.block,
      of.how.factor,
      of.flags,
      received,
      levels,
      {Its::lane()}};
  here.encode({rounding.stochastic, 7, splitmix64(key ^ (span.element + first))});
}

template <bool kFeedsBack>
__global__ void __launch_bounds__(kThreads)
    encode(const __grid_constant__ Int4Stage<Encoding> of, Int8Rounding rounding) {
  const Levels levels(rounding.stochastic);
  of.spans.each_tile(Its::number(), Its::count(), [&](Tile<GpuSpan> tile) {
    const GpuSpan& span = tile.span;
    if (is_aligned(span.x) && (!of.how.finishes || is_aligned(span.y)) &&
        is_aligned(span.span_feedback))
      encode_unit<kFeedsBack, 4>(of, span, tile.number, rounding, levels);
    else
      encode_unit<kFeedsBack, 1>(of, span, tile.number, rounding, levels);
  });
}

Status int4_encode_spans(std::uint64_t block, Int8Rounding rounding, const GpuSpan* spans,
                         int count, const Encoding& how, std::uint32_t* flags, Stream stream) {
  return in_batches(spans, count, units_of, [&](const Batch<GpuSpan>& batch) {
    const auto kernel = keeps_errors(batch.at[0].span_feedback) ? encode<true> : encode<false>;
    return launch(kernel, blocks_for(batch.tiles(), kWarps), kThreads, stream,
                  Int4Stage<Encoding>{batch, block, how, flags}, rounding);
  });
}

// ---- Decoding ----------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads)
    decode(const __grid_constant__ Int4Stage<Decoding> of, bool stochastic) {
  const Levels levels(stochastic);
  of.spans.each_tile(Its::number(), Its::count(), [&](Tile<GpuSpan> tile) {
    const GpuSpan& span = tile.span;
    const std::uint64_t first = tile.number * kUnit, n = length_of(span, first);
    const Decoding& how = of.how;
    const StridedPayloads received{how.payloads, span.payload + of.payload_bytes(tile.number)};
    if (is_aligned(span.y))
      decode_unit<4>(received, n, of.block, levels, how.adds, how.factor, of.flags, span.y + first);
    else
      decode_unit<1>(received, n, of.block, levels, how.adds, how.factor, of.flags, span.y + first);
  });
}

Status int4_decode_spans(std::uint64_t block, bool stochastic, const GpuSpan* spans, int count,
                         const Decoding& how, std::uint32_t* flags, Stream stream) {
  return in_batches(spans, count, units_of, [&](const Batch<GpuSpan>& batch) {
    return launch(decode, blocks_for(batch.tiles(), kWarps), kThreads, stream,
                  Int4Stage<Decoding>{batch, block, how, flags}, stochastic);
  });
}

}  // namespace

void fill_int4(Api& api) {
  api.int4_encode_spans = int4_encode_spans;
  api.int4_decode_spans = int4_decode_spans;
}

}  // namespace gradwire::cuda
