// int8: launches over runs (int8.cuh has the blocks).
#include "gradwire/cuda/plugin/batch.cuh"
#include "gradwire/cuda/plugin/functions.h"
#include "gradwire/cuda/plugin/int8/int8.cuh"
#include "gradwire/cuda/plugin/payloads.cuh"
#include "gradwire/cuda/plugin/run_feedback.cuh"

namespace gradwire::cuda {
namespace {

using namespace int8;

constexpr unsigned kThreads = 256;
constexpr unsigned kMostWarps = kThreads / kWarp;  // of a team

// A run, and its part of the first message that was received.
struct Int8Run {
  const float* x;
  RunFeedback run_feedback;
  const std::byte* in;
  std::byte* out;
  float* y;  // null: not written
  std::uint64_t n, call, element;
};

struct Int8Stage {
  Batch<Int8Run> runs;
  std::uint64_t block, segments;  // segments: of a block
  float factor;
  Payloads received;
  bool adds;  // decoders: to y
  std::uint32_t* flags;
};

// ---- Encoding ----------------------------------------------------------------------------------

template <bool kFeedsBack, unsigned kWide, typename Team>
__device__ void encode_block(const Int8Stage& of, const Int8Run& run, std::uint64_t unit,
                             const Int8Rounding& rounding) {
  Feedback feedback{};
  if constexpr (kFeedsBack) feedback = feedback_of(run.run_feedback);
  const std::uint64_t key =
      run_key(rounding.seed, run.call, kFeedsBack ? run.run_feedback.key_state->calls : 0);
  const std::uint64_t first = unit * of.block, left = run.n - first;
  const std::uint64_t payload = unit * payload_bytes(of.block);
  const StridedPayloads received{of.received.count == 0 ? nullptr : run.in + payload, of.received};
  const Block<kFeedsBack, kWide, Team, StridedPayloads> here{
      run.x + first,
      kFeedsBack ? feedback.before + first : nullptr,
      kFeedsBack ? feedback.after + first : nullptr,
      run.y == nullptr ? nullptr : run.y + first,
      run.out + payload,
      left < of.block ? left : of.block,
      of.factor,
      of.flags,
      received,
      Team{},
      {Team::lane()}};
  here.encode({rounding.stochastic, splitmix64(key ^ (run.element + first))});
}

template <bool kFeedsBack, bool kAlone>
__global__ void __launch_bounds__(kThreads)
    encode(const __grid_constant__ Int8Stage of, Int8Rounding rounding) {
  using Its = Team<kAlone>;
  for (std::uint64_t tile = Its::number(); tile < of.runs.tiles(); tile += Its::count()) {
    const unsigned r = of.runs.find(tile);
    const Int8Run& run = of.runs.at[r];
    const std::uint64_t unit = tile - of.runs.first[r];
    if (all_aligned(run.x, run.y) && is_aligned(run.run_feedback))
      encode_block<kFeedsBack, 4, Its>(of, run, unit, rounding);
    else
      encode_block<kFeedsBack, 1, Its>(of, run, unit, rounding);
  }
}

template <bool kFeedsBack>
Status start_encode(const Int8Stage& of, const Int8Rounding& rounding, Stream stream) {
  if (of.block <= kSegment)
    return launch(encode<kFeedsBack, true>, blocks_for(of.runs.tiles(), kMostWarps), kThreads,
                  stream, of, rounding);
  const auto threads =
      static_cast<unsigned>(of.segments < kMostWarps ? of.segments : kMostWarps) * kWarp;
  return launch(encode<kFeedsBack, false>, of.runs.tiles(), threads, stream, of, rounding);
}

Int8Stage stage_of(std::uint64_t block, const Payloads& in, float factor, std::uint32_t* flags) {
  Int8Stage of{};
  of.block = block;
  of.segments = blocks_for(block, kSegment);
  of.factor = factor;
  of.received = in;
  of.flags = flags;
  return of;
}

Status int8_encode_runs(std::uint64_t block, Int8Rounding rounding, const Run* runs, int count,
                        const Encoding& how, std::uint32_t* flags, Stream stream) {
  Int8Stage of = stage_of(block, how.received, how.factor, flags);
  return in_batches(
      runs, count,
      [&](const Run& run) {
        return Int8Run{run.x,
                       run.run_feedback,
                       how.received.count == 0 ? nullptr : how.received.first + run.received,
                       how.out + run.payload,
                       how.finishes ? run.y : nullptr,
                       run.n,
                       run.call,
                       run.element};
      },
      [block](const Run& run) { return blocks_for(run.n, block); },
      [&](const Batch<Int8Run>& batch) {
        of.runs = batch;
        return keeps_errors(batch.at[0].run_feedback) ? start_encode<true>(of, rounding, stream)
                                                      : start_encode<false>(of, rounding, stream);
      });
}

// ---- Decoding, by segments, since a value needs no more than its block's scale ------------------

__global__ void __launch_bounds__(kThreads) decode(const __grid_constant__ Int8Stage of) {
  for (std::uint64_t tile = first_index() / kWarp; tile < of.runs.tiles();
       tile += index_stride() / kWarp) {
    const unsigned r = of.runs.find(tile);
    const Int8Run& run = of.runs.at[r];
    const std::uint64_t number = tile - of.runs.first[r];
    const std::uint64_t unit = number / of.segments, inside = number % of.segments * kSegment;
    const std::uint64_t left = run.n - unit * of.block;
    const std::uint64_t length = left < of.block ? left : of.block;
    if (inside >= length) continue;
    const StridedPayloads received{run.in + unit * payload_bytes(of.block), of.received};
    float* const y = run.y + unit * of.block + inside;
    if (is_aligned(run.y))
      decode_segment<4>(received, inside, length - inside, of.adds, of.factor, of.flags, y);
    else
      decode_segment<1>(received, inside, length - inside, of.adds, of.factor, of.flags, y);
  }
}

Status int8_decode_runs(std::uint64_t block, const Run* runs, int count, const Decoding& how,
                        std::uint32_t* flags, Stream stream) {
  Int8Stage of = stage_of(block, how.payloads, how.factor, flags);
  of.adds = how.adds;
  return in_batches(
      runs, count,
      [&](const Run& run) {
        return Int8Run{nullptr, {}, how.payloads.first + run.payload, nullptr, run.y, run.n, 0, 0};
      },
      [&](const Run& run) { return blocks_for(run.n, block) * of.segments; },
      [&](const Batch<Int8Run>& batch) {
        of.runs = batch;
        return launch(decode, blocks_for(batch.tiles(), kMostWarps), kThreads, stream, of);
      });
}

}  // namespace

void fill_int8(Api& api) {
  api.int8_encode_runs = int8_encode_runs;
  api.int8_decode_runs = int8_decode_runs;
}

}  // namespace gradwire::cuda
