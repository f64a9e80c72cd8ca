// onebit: launches of the encoder over spans (onebit_block.cuh has the blocks).
#include "gradwire/cuda/plugin/batch.cuh"
#include "gradwire/cuda/plugin/functions.h"
#include "gradwire/cuda/plugin/onebit/onebit_block.cuh"
#include "gradwire/cuda/plugin/payloads.cuh"
#include "gradwire/cuda/plugin/span_feedback.cuh"

namespace gradwire::cuda {
namespace {

using namespace onebit;

struct Encoder {
  Batch<GpuSpan> spans;
  std::uint64_t block, slot_bytes;
  Encoding how;
  std::uint32_t* flags;
};

template <bool kFeedsBack, bool kFinishes, bool kAlone, typename Received>
__device__ void encode_block(const Encoder& of, Tile<GpuSpan> tile, const Received& received,
                             BitRoom<kAlone>& bits, GroupRoom<kAlone>* group) {
  using Its = Team<kAlone>;
  const GpuSpan& span = tile.span;
  Residuals feedback{};
  if constexpr (kFeedsBack) feedback = feedback_of(span.span_feedback);
  const std::uint64_t begin = tile.number * of.block, left = span.n - begin;
  const auto n = static_cast<std::uint32_t>(left < of.block ? left : of.block);
  const std::uint32_t stripe = Its::warp() * kStripe;
  const OneBitBlockEncoder<kFeedsBack, kFinishes, kAlone, Received> here{
      span,
      feedback,
      tile.number,
      begin + stripe,
      n,
      n > stripe ? n - stripe : 0,
      of.how.out + span.payload + table_bytes(tile.all) + tile.number * of.slot_bytes,
      of.how,
      of.flags,
      received,
      of.slot_bytes,
      Its{},
      {Its::lane()},
      bits,
      group};
  here.encode();
}

template <bool kFeedsBack, bool kFinishes, bool kAdds, bool kAlone>
__global__ void __launch_bounds__(kWarp*(kAlone ? kAloneWarps : kMostWarps),
                                  kAlone ? kAloneBlocks : 2)
    encode(const __grid_constant__ Encoder of) {
  using Its = Team<kAlone>;
  __shared__ BitRoom<kAlone> bits[kAlone ? kAloneWarps : 1];
  const unsigned place = kAlone ? threadIdx.x / kWarp : 0;
  of.spans.each_tile(Its::number(), Its::count(), [&](Tile<GpuSpan> tile) {
    if constexpr (kAdds) {
      __shared__ GroupRoom<kAlone> groups[kAlone ? kAloneWarps : 1];
      const StridedPayloads received{of.how.received, tile.span.received + table_bytes(tile.all) +
                                                          tile.number * of.slot_bytes};
      encode_block<kFeedsBack, kFinishes, kAlone>(of, tile, received, bits[place], groups + place);
    } else {
      encode_block<kFeedsBack, kFinishes, kAlone>(of, tile, NoPayloads{}, bits[place], nullptr);
    }
  });
}

template <bool kFeedsBack, bool kFinishes, bool kAdds>
Status start(const Encoder& of, Stream stream) {
  if (of.block <= kStripe)
    return launch(encode<kFeedsBack, kFinishes, kAdds, true>,
                  blocks_for(of.spans.tiles(), kAloneWarps), kAloneWarps * kWarp, stream, of);
  const auto warps = static_cast<unsigned>(blocks_for(of.block, kStripe));
  return launch(encode<kFeedsBack, kFinishes, kAdds, false>, of.spans.tiles(), warps * kWarp,
                stream, of);
}

template <bool kFeedsBack>
Status start(const Encoder& of, Stream stream) {
  if (of.how.received.count > 0)
    return of.how.finishes ? start<kFeedsBack, true, true>(of, stream)
                           : start<kFeedsBack, false, true>(of, stream);
  return of.how.finishes ? start<kFeedsBack, true, false>(of, stream)
                         : start<kFeedsBack, false, false>(of, stream);
}

Status onebit_encode_spans(std::uint64_t block, const GpuSpan* spans, int count,
                           const Encoding& how, std::uint32_t* flags, Stream stream) {
  if (block > OneBitKernels::kMostBlock) return cudaErrorInvalidValue;
  const auto tiles = [block](const GpuSpan& span) { return blocks_for(span.n, block); };
  return in_batches(spans, count, tiles, [&](const Batch<GpuSpan>& batch) {
    const Encoder of{batch, block, slot_bytes(block), how, flags};
    return keeps_errors(batch.at[0].span_feedback) ? start<true>(of, stream)
                                                   : start<false>(of, stream);
  });
}

}  // namespace

void fill_onebit(Api& api) { api.onebit_encode_spans = onebit_encode_spans; }

}  // namespace gradwire::cuda
