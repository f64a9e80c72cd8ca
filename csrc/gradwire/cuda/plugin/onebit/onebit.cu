// onebit: launches of the encoder over runs (onebit_block.cuh has the blocks).
#include "gradwire/cuda/plugin/batch.cuh"
#include "gradwire/cuda/plugin/functions.h"
#include "gradwire/cuda/plugin/onebit/onebit_block.cuh"
#include "gradwire/cuda/plugin/payloads.cuh"
#include "gradwire/cuda/plugin/run_feedback.cuh"

namespace gradwire::cuda {
namespace {

using namespace onebit;

// A run, and its part of the first message that was received.
struct OneBitRun {
  const float* x;
  RunFeedback run_feedback;
  const std::byte* in;  // the slots
  std::byte* out;       // likewise
  std::uint32_t* sizes;
  float* y;  // null: not written
  std::uint64_t n;
};

struct Encoder {
  Batch<OneBitRun> runs;
  std::uint64_t block, slot_bytes;
  float factor;  // of y
  Payloads received;
  std::uint32_t* flags;
};

template <bool kFeedsBack, bool kFinishes, bool kAlone, typename Payloads>
__device__ void encode_block(const Encoder& of, const OneBitRun& run, std::uint64_t unit,
                             const Payloads& payloads, BitRoom<kAlone>& bits,
                             GroupRoom<kAlone>* group) {
  Feedback feedback{};
  if constexpr (kFeedsBack) feedback = feedback_of(run.run_feedback);
  using Its = Team<kAlone>;
  const std::uint64_t begin = unit * of.block;
  const auto n = static_cast<std::uint32_t>(run.n - begin < of.block ? run.n - begin : of.block);
  const std::uint32_t segment = Its::warp() * kSegment;
  const Block<kFeedsBack, kFinishes, kAlone, OneBitRun, Payloads> here{
      run,
      feedback,
      unit,
      begin + segment,
      n,
      n > segment ? n - segment : 0,
      run.out + unit * of.slot_bytes,
      of.factor,
      of.flags,
      payloads,
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
  for (std::uint64_t tile = Its::number(); tile < of.runs.tiles(); tile += Its::count()) {
    const unsigned r = of.runs.find(tile);
    const OneBitRun& run = of.runs.at[r];
    const std::uint64_t unit = tile - of.runs.first[r];
    if constexpr (kAdds) {
      __shared__ GroupRoom<kAlone> groups[kAlone ? kAloneWarps : 1];
      const StridedPayloads received{run.in + unit * of.slot_bytes, of.received};
      encode_block<kFeedsBack, kFinishes, kAlone>(of, run, unit, received, bits[place],
                                                  groups + place);
    } else {
      encode_block<kFeedsBack, kFinishes, kAlone>(of, run, unit, NoPayloads{}, bits[place],
                                                  nullptr);
    }
  }
}

template <bool kFeedsBack, bool kFinishes, bool kAdds>
Status start(const Encoder& of, Stream stream) {
  if (of.block <= kSegment)
    return launch(encode<kFeedsBack, kFinishes, kAdds, true>,
                  blocks_for(of.runs.tiles(), kAloneWarps), kAloneWarps * kWarp, stream, of);
  const auto warps = static_cast<unsigned>(blocks_for(of.block, kSegment));
  return launch(encode<kFeedsBack, kFinishes, kAdds, false>, of.runs.tiles(), warps * kWarp, stream,
                of);
}

template <bool kFeedsBack>
Status start(const Encoder& of, bool finishes, Stream stream) {
  if (of.received.count > 0)
    return finishes ? start<kFeedsBack, true, true>(of, stream)
                    : start<kFeedsBack, false, true>(of, stream);
  return finishes ? start<kFeedsBack, true, false>(of, stream)
                  : start<kFeedsBack, false, false>(of, stream);
}

Status onebit_encode_runs(std::uint64_t block, const Run* runs, int count, const Encoding& how,
                          std::uint32_t* flags, Stream stream) {
  if (block > OneBitKernels::kMostBlock) return cudaErrorInvalidValue;
  Encoder of{{}, block, slot_bytes(block), how.factor, how.received, flags};
  return in_batches(
      runs, count,
      [&](const Run& run) {
        const std::uint64_t table = table_bytes(run.n, block);
        return OneBitRun{
            run.x,
            run.run_feedback,
            how.received.count == 0 ? nullptr : how.received.first + run.received + table,
            how.out + run.payload + table,
            reinterpret_cast<std::uint32_t*>(how.out + run.payload),
            how.finishes ? run.y : nullptr,
            run.n};
      },
      [block](const Run& run) { return blocks_for(run.n, block); },
      [&](const Batch<OneBitRun>& batch) {
        of.runs = batch;
        return keeps_errors(batch.at[0].run_feedback) ? start<true>(of, how.finishes, stream)
                                                      : start<false>(of, how.finishes, stream);
      });
}

}  // namespace

void fill_onebit(Api& api) { api.onebit_encode_runs = onebit_encode_runs; }

}  // namespace gradwire::cuda
