// An all_reduce in int8 as one kernel over staging (coded_reduce.cuh). A tile is whole blocks,
// which warps, or all warps together, take in turn.
#include "gradwire/cuda/plugin/coded_reduce.cuh"
#include "gradwire/cuda/plugin/functions.h"
#include "gradwire/cuda/plugin/int8/int8.cuh"

namespace gradwire::cuda {
namespace {

using namespace int8;

struct Int8Reduction {
  Steps steps;
  std::uint64_t block;
  Int8Rounding rounding;  // without call and element
  float factor;
  std::uint32_t* flags;
};

template <bool kFeedsBack, bool kAlone>
struct StagedInt8 {
  using Its = Team<kAlone>;
  const Int8Reduction& of;

  // Encodes the tile's blocks, and decodes them to y if they are `finished`.
  template <unsigned kWide, typename Payloads>
  __device__ void encode(const Tile& tile, const Payloads& payloads, std::byte* to,
                         bool finished) const {
    const SummedRun& run = *tile.run;
    const CodedTile its = CodedTile::of(tile);
    const std::uint64_t key =
        run_key(of.rounding.seed, run.call, kFeedsBack ? run.run_feedback.key_state->calls : 0);
    each_unit<Its>(its.n, of.block, [&](std::uint64_t unit, std::uint64_t first, std::uint64_t n) {
      const Shifted<Payloads> received{payloads, unit * payload_bytes(of.block)};
      const Block<kFeedsBack, kWide, Its, Shifted<Payloads>> here{
          its.x + first,
          kFeedsBack ? its.before + first : nullptr,
          kFeedsBack ? its.after + first : nullptr,
          finished ? its.y + first : nullptr,
          to + unit * payload_bytes(of.block),
          n,
          of.factor,
          of.flags,
          received,
          Its{},
          {Its::lane()}};
      here.encode({of.rounding.stochastic, splitmix64(key ^ (run.element + tile.begin + first))});
    });
  }

  template <typename Payloads>
  __device__ void encode(const Tile& tile, const Payloads& payloads, std::byte* to,
                         bool finished) const {
    if (CodedTile::of(tile).is_wide())
      encode<4>(tile, payloads, to, finished);
    else
      encode<1>(tile, payloads, to, finished);
  }
  __device__ void send(const Tile& tile, std::byte* to) const {
    encode(tile, NoPayloads{}, to, /*finished=*/false);
  }
  __device__ void finish(const Tile& tile, const StagedPayloads& payloads, std::byte* to) const {
    encode(tile, payloads, to, /*finished=*/true);
  }

  // By segments, since a value needs no more than its block's scale.
  __device__ void receive(const Tile& tile, const std::byte* from) const {
    const CodedTile its = CodedTile::of(tile);
    const std::uint64_t segments = blocks_for(of.block, kSegment);
    const std::uint64_t all = blocks_for(its.n, of.block) * segments;
    for (std::uint64_t i = threadIdx.x / kWarp; i < all; i += blockDim.x / kWarp) {
      const std::uint64_t unit = i / segments, inside = i % segments * kSegment;
      const std::uint64_t left = its.n - unit * of.block;
      const std::uint64_t length = left < of.block ? left : of.block;
      if (inside >= length) continue;
      const OnePayload payload{from + unit * payload_bytes(of.block)};
      float* const y = its.y + unit * of.block + inside;
      if (is_aligned(its.y))
        decode_segment<4>(payload, inside, length - inside, false, of.factor, of.flags, y);
      else
        decode_segment<1>(payload, inside, length - inside, false, of.factor, of.flags, y);
    }
  }
};

template <bool kFeedsBack, bool kAlone>
__global__ void __launch_bounds__(kStagedThreads)
    int8_reduce_kernel(const __grid_constant__ Int8Reduction of) {
  const StagedInt8<kFeedsBack, kAlone> codec{of};
  reduce_coded(of.steps, codec);
}

Status int8_reduce(const Staging& staging, std::uint64_t block, Int8Rounding rounding,
                   const SummedRun* runs, int count, float factor, std::uint32_t* flags,
                   Stream stream) {
  const auto start = [&](const Steps& steps) {
    const bool alone = block <= kSegment;
    const auto kernel =
        keeps_errors(steps.runs.at[0].run_feedback)
            ? (alone ? int8_reduce_kernel<true, true> : int8_reduce_kernel<true, false>)
            : (alone ? int8_reduce_kernel<false, true> : int8_reduce_kernel<false, false>);
    return launch_waiting(kernel, steps.blocks(), kStagedThreads, stream,
                          Int8Reduction{steps, block, rounding, factor, flags});
  };
  return in_coded_steps(staging, runs, count, block, payload_bytes(block), start);
}

}  // namespace

void fill_int8_reduce(Api& api) { api.int8_reduce = int8_reduce; }

}  // namespace gradwire::cuda
