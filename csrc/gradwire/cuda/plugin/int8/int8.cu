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

// How: Encoding or Decoding.
template <typename How>
struct Int8Stage {
  Batch<Run> runs;
  std::uint64_t block, segments;  // segments: of a block
  How how;
  std::uint32_t* flags;
};

// ---- Encoding ----------------------------------------------------------------------------------

template <bool kFeedsBack, unsigned kWide, typename Team>
__device__ void encode_block(const Int8Stage<Encoding>& of, const Run& run, std::uint64_t unit,
                             const Int8Rounding& rounding) {
  Feedback feedback{};
  if constexpr (kFeedsBack) feedback = feedback_of(run.run_feedback);
  const std::uint64_t key =
      run_key(rounding.seed, run.call, kFeedsBack ? run.run_feedback.key_state->calls : 0);
  const std::uint64_t first = unit * of.block, left = run.n - first;
  const std::uint64_t payload = unit * payload_bytes(of.block);
  const StridedPayloads received{of.how.received, run.received + payload};
  const Block<kFeedsBack, kWide, Team, StridedPayloads> here{
      run.x + first,
      kFeedsBack ? feedback.before + first : nullptr,
      kFeedsBack ? feedback.after + first : nullptr,
      of.how.finishes ? run.y + first : nullptr,
      of.how.out + run.payload + payload,
      left < of.block ? left : of.block,
      of.how.factor,
      of.flags,
      received,
      Team{},
      {Team::lane()}};
  here.encode({rounding.stochastic, splitmix64(key ^ (run.element + first))});
}

template <bool kFeedsBack, bool kAlone>
__global__ void __launch_bounds__(kThreads)
    encode(const __grid_constant__ Int8Stage<Encoding> of, Int8Rounding rounding) {
  using Its = Team<kAlone>;
  of.runs.each_tile(Its::number(), Its::count(), [&](Tile<Run> tile) {
    const Run& run = tile.run;
    if (is_aligned(run.x) && (!of.how.finishes || is_aligned(run.y)) &&
        is_aligned(run.run_feedback))
      encode_block<kFeedsBack, 4, Its>(of, run, tile.number, rounding);
    else
      encode_block<kFeedsBack, 1, Its>(of, run, tile.number, rounding);
  });
}

template <bool kFeedsBack>
Status start_encode(const Int8Stage<Encoding>& of, const Int8Rounding& rounding, Stream stream) {
  if (of.block <= kSegment)
    return launch(encode<kFeedsBack, true>, blocks_for(of.runs.tiles(), kMostWarps), kThreads,
                  stream, of, rounding);
  const auto threads =
      static_cast<unsigned>(of.segments < kMostWarps ? of.segments : kMostWarps) * kWarp;
  return launch(encode<kFeedsBack, false>, of.runs.tiles(), threads, stream, of, rounding);
}

Status int8_encode_runs(std::uint64_t block, Int8Rounding rounding, const Run* runs, int count,
                        const Encoding& how, std::uint32_t* flags, Stream stream) {
  const auto tiles = [block](const Run& run) { return blocks_for(run.n, block); };
  return in_batches(runs, count, tiles, [&](const Batch<Run>& batch) {
    const Int8Stage<Encoding> of{batch, block, blocks_for(block, kSegment), how, flags};
    return keeps_errors(batch.at[0].run_feedback) ? start_encode<true>(of, rounding, stream)
                                                  : start_encode<false>(of, rounding, stream);
  });
}

// ---- Decoding, by segments, since a value needs no more than its block's scale ------------------

__global__ void __launch_bounds__(kThreads) decode(const __grid_constant__ Int8Stage<Decoding> of) {
  using Its = Team<true>;
  of.runs.each_tile(Its::number(), Its::count(), [&](Tile<Run> tile) {
    const Run& run = tile.run;
    const std::uint64_t unit = tile.number / of.segments,
                        inside = tile.number % of.segments * kSegment;
    const std::uint64_t left = run.n - unit * of.block;
    const std::uint64_t length = left < of.block ? left : of.block;
    if (inside >= length) return;
    const Decoding& how = of.how;
    const StridedPayloads received{how.payloads, run.payload + unit * payload_bytes(of.block)};
    float* const y = run.y + unit * of.block + inside;
    if (is_aligned(run.y))
      decode_segment<4>(received, inside, length - inside, how.adds, how.factor, of.flags, y);
    else
      decode_segment<1>(received, inside, length - inside, how.adds, how.factor, of.flags, y);
  });
}

Status int8_decode_runs(std::uint64_t block, const Run* runs, int count, const Decoding& how,
                        std::uint32_t* flags, Stream stream) {
  const std::uint64_t segments = blocks_for(block, kSegment);
  const auto tiles = [&](const Run& run) { return blocks_for(run.n, block) * segments; };
  return in_batches(runs, count, tiles, [&](const Batch<Run>& batch) {
    const Int8Stage<Decoding> of{batch, block, segments, how, flags};
    return launch(decode, blocks_for(batch.tiles(), kMostWarps), kThreads, stream, of);
  });
}

}  // namespace

void fill_int8(Api& api) {
  api.int8_encode_runs = int8_encode_runs;
  api.int8_decode_runs = int8_decode_runs;
}

}  // namespace gradwire::cuda
