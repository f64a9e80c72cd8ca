// An all_reduce in onebit as one kernel over staging (coded_reduce.cuh). A tile is a slot for each
// of its blocks, which warps, or all warps together, take in turn.
#include "gradwire/cuda/plugin/coded_reduce.cuh"
#include "gradwire/cuda/plugin/functions.h"
#include "gradwire/cuda/plugin/onebit/onebit_block.cuh"

namespace gradwire::cuda {
namespace {

using namespace onebit;

struct OneBitReduction {
  Steps steps;
  std::uint64_t block, slot_bytes;
  float factor;
  std::uint32_t* flags;
};

struct OneBitTile {
  const float* x;
  float* y;
  static constexpr std::uint32_t* sizes = nullptr;  // nobody asks
};

template <bool kFeedsBack, bool kAlone>
struct StagedOneBit {
  using Its = Team<kAlone>;
  const OneBitReduction& of;
  BitRoom<kAlone>& bits;
  GroupRoom<kAlone>& group;

  // Encodes the tile's blocks, and decodes them to y if it finishes.
  template <bool kFinishes, typename Payloads>
  __device__ void encode(const Tile& tile, const Payloads& payloads, std::byte* to) const {
    const CodedTile its = CodedTile::of(tile);
    const OneBitTile run{its.x, its.y};
    each_unit<Its>(its.n, of.block, [&](std::uint64_t unit, std::uint64_t first, std::uint64_t n) {
      const Shifted<Payloads> received{payloads, unit * of.slot_bytes};
      const auto length = static_cast<std::uint32_t>(n);
      const std::uint32_t segment = Its::warp() * kSegment;
      const Block<kFeedsBack, kFinishes, kAlone, OneBitTile, Shifted<Payloads>> here{
          run,
          {its.before, its.after},
          unit,
          first + segment,
          length,
          length > segment ? length - segment : 0,
          to + unit * of.slot_bytes,
          of.factor,
          of.flags,
          received,
          of.slot_bytes,
          Its{},
          {Its::lane()},
          bits,
          &group};
      here.encode();
    });
  }
  __device__ void send(const Tile& tile, std::byte* to) const {
    encode</*kFinishes=*/false>(tile, NoPayloads{}, to);
  }
  __device__ void finish(const Tile& tile, const StagedPayloads& payloads, std::byte* to) const {
    encode</*kFinishes=*/true>(tile, payloads, to);
  }

  __device__ void receive(const Tile& tile, const std::byte* from) const {
    const CodedTile its = CodedTile::of(tile);
    each_unit<Its>(its.n, of.block, [&](std::uint64_t unit, std::uint64_t first, std::uint64_t n) {
      const OnePayload payload{from + unit * of.slot_bytes};
      decode_block(payload, of.slot_bytes, static_cast<std::uint32_t>(n), Its{}, group, of.factor,
                   of.flags, its.y + first);
    });
  }
};

template <bool kFeedsBack, bool kAlone>
__global__ void __launch_bounds__(kAlone ? kStagedThreads : kWarp * kMostWarps)
    onebit_reduce_kernel(const __grid_constant__ OneBitReduction of) {
  constexpr unsigned kTeams = kAlone ? kStagedThreads / kWarp : 1;
  __shared__ BitRoom<kAlone> bits[kTeams];
  __shared__ GroupRoom<kAlone> groups[kTeams];
  const unsigned place = kAlone ? threadIdx.x / kWarp : 0;
  const StagedOneBit<kFeedsBack, kAlone> codec{of, bits[place], groups[place]};
  reduce_coded(of.steps, codec);
}

Status onebit_reduce(const Staging& staging, std::uint64_t block, const SummedRun* runs, int count,
                     float factor, std::uint32_t* flags, Stream stream) {
  if (block > OneBitKernels::kMostBlock) return cudaErrorInvalidValue;
  const bool alone = block <= kSegment;
  const unsigned threads =
      alone ? kStagedThreads : static_cast<unsigned>(blocks_for(block, kSegment)) * kWarp;
  const auto start = [&](const Steps& steps) {
    const auto kernel =
        keeps_errors(steps.runs.at[0].run_feedback)
            ? (alone ? onebit_reduce_kernel<true, true> : onebit_reduce_kernel<true, false>)
            : (alone ? onebit_reduce_kernel<false, true> : onebit_reduce_kernel<false, false>);
    return launch_waiting(kernel, steps.blocks(), threads, stream,
                          OneBitReduction{steps, block, slot_bytes(block), factor, flags});
  };
  return in_coded_steps(staging, runs, count, block, slot_bytes(block), start);
}

}  // namespace

void fill_onebit_reduce(Api& api) { api.onebit_reduce = onebit_reduce; }

}  // namespace gradwire::cuda
