// int8: launches over spans (int8.cuh has the blocks).
#include "gradwire/cuda/plugin/batch.cuh"
#include "gradwire/cuda/plugin/functions.h"
#include "gradwire/cuda/plugin/int8/int8.cuh"
#include "gradwire/cuda/plugin/payloads.cuh"
#include "gradwire/cuda/plugin/span_feedback.cuh"

namespace gradwire::cuda {
namespace {

using namespace int8;

constexpr unsigned kThreads = 256;
constexpr unsigned kMostWarps = kThreads / kWarp;  // of a team

// How: Encoding or Decoding.
template <typename How>
struct Int8Stage {
  Batch<GpuSpan> spans;
  std::uint64_t block, stripes;  // stripes: of a block
  How how;
  std::uint32_t* flags;
};

// ---- Encoding ----------------------------------------------------------------------------------

template <bool kFeedsBack, unsigned kWide, typename Team>
__device__ void encode_block(const Int8Stage<Encoding>& of, const GpuSpan& span,
                             std::uint64_t number, const Int8Rounding& rounding) {
  Residuals feedback{};
  if constexpr (kFeedsBack) feedback = feedback_of(span.span_feedback);
  const std::uint64_t key =
      run_key(rounding.seed, span.call, kFeedsBack ? span.span_feedback.key_state->calls : 0);
  const std::uint64_t first = number * of.block, left = span.n - first;
  const std::uint64_t payload = number * payload_bytes(of.block);
  const StridedPayloads received{of.how.received, span.received + payload};
  const Int8BlockEncoder<kFeedsBack, kWide, Team, StridedPayloads> here{
      span.x + first,
      kFeedsBack ? feedback.before + first : nullptr,
      kFeedsBack ? feedback.after + first : nullptr,
      of.how.finishes ? span.y + first : nullptr,
      of.how.out + span.payload + payload,
      left < of.block ? left : of.block,
      of.how.factor,
      of.flags,
      received,
      Team{},
      {Team::lane()}};
  here.encode({rounding.stochastic, 127, splitmix64(key ^ (span.element + first))});
}

template <bool kFeedsBack, bool kAlone>
__global__ void __launch_bounds__(kThreads)
    encode(const __grid_constant__ Int8Stage<Encoding> of, Int8Rounding rounding) {
  using Its = Team<kAlone>;
  of.spans.each_tile(Its::number(), Its::count(), [&](Tile<GpuSpan> tile) {
    const GpuSpan& span = tile.span;
    if (is_aligned(span.x) && (!of.how.finishes || is_aligned(span.y)) &&
        is_aligned(span.span_feedback))
      encode_block<kFeedsBack, 4, Its>(of, span, tile.number, rounding);
    else
      encode_block<kFeedsBack, 1, Its>(of, span, tile.number, rounding);
  });
}

template <bool kFeedsBack>
Status start_encode(const Int8Stage<Encoding>& of, const Int8Rounding& rounding, Stream stream) {
  if (of.block <= kStripe)
    return launch(encode<kFeedsBack, true>, blocks_for(of.spans.tiles(), kMostWarps), kThreads,
                  stream, of, rounding);
  const auto threads =
      static_cast<unsigned>(of.stripes < kMostWarps ? of.stripes : kMostWarps) * kWarp;
  return launch(encode<kFeedsBack, false>, of.spans.tiles(), threads, stream, of, rounding);
}

Status int8_encode_spans(std::uint64_t block, Int8Rounding rounding, const GpuSpan* spans,
                         int count, const Encoding& how, std::uint32_t* flags, Stream stream) {
  const auto tiles = [block](const GpuSpan& span) { return blocks_for(span.n, block); };
  return in_batches(spans, count, tiles, [&](const Batch<GpuSpan>& batch) {
    const Int8Stage<Encoding> of{batch, block, blocks_for(block, kStripe), how, flags};
    return keeps_errors(batch.at[0].span_feedback) ? start_encode<true>(of, rounding, stream)
                                                   : start_encode<false>(of, rounding, stream);
  });
}

// ---- Decoding, by stripes, since a value needs no more than its block's scale ------------------

__global__ void __launch_bounds__(kThreads) decode(const __grid_constant__ Int8Stage<Decoding> of) {
  using Its = Team<true>;
  of.spans.each_tile(Its::number(), Its::count(), [&](Tile<GpuSpan> tile) {
    const GpuSpan& span = tile.span;
    const std::uint64_t number = tile.number / of.stripes,
                        inside = tile.number % of.stripes * kStripe;
    const std::uint64_t left = span.n - number * of.block;
    const std::uint64_t length = left < of.block ? left : of.block;
    if (inside >= length) return;
    const Decoding& how = of.how;
    const StridedPayloads received{how.payloads, span.payload + number * payload_bytes(of.block)};
    float* const y = span.y + number * of.block + inside;
    if (is_aligned(span.y))
      decode_stripe<4>(received, inside, length - inside, how.adds, how.factor, of.flags, y);
    else
      decode_stripe<1>(received, inside, length - inside, how.adds, how.factor, of.flags, y);
  });
}

Status int8_decode_spans(std::uint64_t block, const GpuSpan* spans, int count, const Decoding& how,
                         std::uint32_t* flags, Stream stream) {
  const std::uint64_t stripes = blocks_for(block, kStripe);
  const auto tiles = [&](const GpuSpan& span) { return blocks_for(span.n, block) * stripes; };
  return in_batches(spans, count, tiles, [&](const Batch<GpuSpan>& batch) {
    const Int8Stage<Decoding> of{batch, block, stripes, how, flags};
    return launch(decode, blocks_for(batch.tiles(), kMostWarps), kThreads, stream, of);
  });
}

}  // namespace

void fill_int8(Api& api) {
  api.int8_encode_spans = int8_encode_spans;
  api.int8_decode_spans = int8_decode_spans;
}

}  // namespace gradwire::cuda
