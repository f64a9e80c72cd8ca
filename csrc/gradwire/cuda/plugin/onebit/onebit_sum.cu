// onebit's decoder (codec/onebit.cc defines it): it adds all payloads in one pass. As the
// definition says, four payloads are added to each other before their sum is added to others. Where
// none of the four has a mask, an element can have only 16 sums; these are computed once a block
// and looked up by the elements' signs. A kernel that adds many payloads is bound by the rate at
// which instructions are issued: of a payload nothing is checked but its means.
#include "gradwire/cuda/plugin/batch.cuh"
#include "gradwire/cuda/plugin/functions.h"
#include "gradwire/cuda/plugin/onebit/onebit_group.cuh"
#include "gradwire/cuda/plugin/share.cuh"

namespace gradwire::cuda {
namespace {

using namespace onebit;

// Of a span, `payload` is where its slots begin.
struct SumStage {
  Batch<GpuSpan> spans;
  std::uint64_t block, slot_bytes;
  Decoding how;
  unsigned together;  // payloads that are added to each other first: kGroup, or 1
  std::uint32_t* flags;
};

// ---- Sums of a group ---------------------------------------------------------------------------

// A warp's table: for each lane the signs of four payloads for 32 elements, and the sum that each
// combination of four signs stands for.
struct SumTable {
  struct alignas(16) Fours {
    std::uint32_t at[kGroup];  // element e has four bits of at[e % 4], from bit 4 (e / 4) on
  };
  Fours signs[kWarp];
  float sums[1U << kGroup];
};

// Swaps the bits of a outside the mask with those of b inside it, which lie `by` places lower: one
// step of a transposition of bits.
__device__ void exchange(std::uint32_t& a, std::uint32_t& b, int by, std::uint32_t mask) {
  const std::uint32_t low = (a & mask) | ((b & mask) << by);
  b = ((a >> by) & mask) | (b & ~mask);
  a = low;
}

__device__ void fill(SumTable& table, const PayloadGroup& group, unsigned lane) {
  SumTable::Fours fours;
#pragma unroll
  for (unsigned p = 0; p < kGroup; ++p) fours.at[p] = group.planes[p].word;
  exchange(fours.at[0], fours.at[2], 2, 0x33333333U);
  exchange(fours.at[1], fours.at[3], 2, 0x33333333U);
  exchange(fours.at[0], fours.at[1], 1, 0x55555555U);
  exchange(fours.at[2], fours.at[3], 1, 0x55555555U);
  float sum = 0;
#pragma unroll
  for (unsigned p = 0; p < kGroup; ++p) {
    const SentMeans means = group.planes[p].means;
    const float value = 0 + ((lane >> p & 1U) != 0 ? means.minus : means.plus);  // as decoded()
    if (p < group.count) sum = p == 0 ? value : sum + value;
  }
  __syncwarp();  // nobody reads the old contents any more
  table.signs[lane] = fours;
  if (lane < (1U << kGroup)) table.sums[lane] = sum;
  __syncwarp();
}

// Returns the sum that four bits of a word stand for. `turn` is the position of these bits minus 2,
// so that the rotated word holds their offset into the sums in bytes.
__device__ float look_up(const SumTable& table, std::uint32_t word, std::uint32_t turn) {
  const std::uint32_t offset = __funnelshift_r(word, word, turn) & 0x3CU;
  return *reinterpret_cast<const float*>(reinterpret_cast<const std::byte*>(table.sums) + offset);
}

template <unsigned kWide>
__device__ void add_table(const SumTable& table, unsigned lane, float (&acc)[kCount]) {
  const std::uint32_t turn = (kWide == kGroup ? lane % 8 : lane / 4) * 4 - 2;
#pragma unroll
  for (unsigned i = 0; i < kCount; i += kWide) {
    if constexpr (kWide == kGroup) {
      const SumTable::Fours fours = table.signs[i + lane / 8];
#pragma unroll
      for (unsigned k = 0; k < kWide; ++k)
        acc[i + k] = acc[i + k] + look_up(table, fours.at[k], turn);
    } else {
      acc[i] = acc[i] + look_up(table, table.signs[i].at[lane % 4], turn);
    }
  }
}

// Adds the payloads one after the other; one whose mask leaves an element out adds +0.
template <unsigned kWide, bool kAlone>
__device__ void add_masked(const GroupRoom<kAlone>& room, unsigned count, unsigned first_word,
                           Share<kWarp, kCount, kWide> share, float (&acc)[kCount]) {
#pragma unroll
  for (unsigned i = 0; i < kCount; ++i) {
    const unsigned element = share.element(i), word = first_word + element / 32;
    const auto value = [&](unsigned p) {
      const bool negative = (room.signs[p][word] >> element % 32 & 1U) != 0;
      const bool present = (room.present[p][word] >> element % 32 & 1U) != 0;
      return present ? (negative ? room.means[p].minus : room.means[p].plus) : 0;
    };
    float sum = value(0);
#pragma unroll 1
    for (unsigned p = 1; p < count; ++p) sum = sum + value(p);
    acc[i] = acc[i] + sum;
  }
}

// ---- Blocks ------------------------------------------------------------------------------------

template <bool kAlone>
struct Rooms {
  GroupRoom<kAlone> groups[kAlone ? kAloneWarps : 1];
  SumTable tables[kAlone ? kAloneWarps : kMostWarps];
};

template <unsigned kWide, bool kAlone>
struct BlockSum {
  const SumStage& of;
  const GpuSpan& span;
  Team<kAlone> team;
  Share<kWarp, kCount, kWide> share;
  GroupRoom<kAlone>& room;
  SumTable& table;
  std::uint64_t number;
  std::uint32_t n;  // elements of the block

  __device__ PayloadSlot slot_at(unsigned p) const {
    const std::byte* const slots = of.how.payloads.first + span.payload;
    return {slots + p * of.how.payloads.stride + number * of.slot_bytes, of.slot_bytes};
  }

  // Loads the group of payloads that begins with payload `first`, whose slot is `slot`; that then
  // is the next group's.
  __device__ PayloadGroup load(unsigned first, const std::byte*& slot) const {
    PayloadGroup group{};
    const auto count = static_cast<unsigned>(of.how.payloads.count);
    const unsigned left = count <= first ? 0 : count - first;
    group.count = left < of.together ? left : of.together;
#pragma unroll
    for (unsigned p = 0; p < kGroup; ++p) {
      if (p >= group.count) continue;
      group.planes[p] = load_slot(slot, n, team.rank());
      slot += of.how.payloads.stride;
    }
    return group;
  }

  // Adds the sums of a group to acc. Returns the flags to set.
  __device__ std::uint32_t add(const PayloadGroup& group, unsigned first,
                               float (&acc)[kCount]) const {
    bool usual = true;
#pragma unroll
    for (unsigned p = 0; p < kGroup; ++p) usual = usual && group.planes[p].means.usual();
    if (!usual) {
      const std::uint32_t flags =
          unpack(group, n, team, room, [&](unsigned p) { return slot_at(first + p); });
      add_masked(room, group.count, team.warp() * kWarp, share, acc);
      return flags;
    }
    fill(table, group, team.lane());
    add_table<kWide>(table, team.lane(), acc);
    return 0;
  }

  __device__ void sum() const {
    const std::uint32_t stripe = team.warp() * kStripe;
    const std::uint32_t inside = n > stripe ? n - stripe : 0;
    float* const y = span.y + number * of.block + stripe;
    float acc[kCount];
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) acc[i] = 0;
    if (of.how.adds) share.load(y, inside, acc);
    std::uint32_t flags = 0;
    const std::byte* slot = slot_at(0).at;
    PayloadGroup group = load(0, slot);
    for (unsigned first = 0; first < static_cast<unsigned>(of.how.payloads.count);
         first += of.together) {
      const PayloadGroup next =
          load(first + of.together, slot);  // while the group before it is added
      flags |= add(group, first, acc);
      group = next;
    }
    finish(acc, (flags & kRefused) != 0);
    share.store(y, inside, acc);
    if (flags != 0 && team.rank() == 0) set_flag(of.flags, flags);
  }

 private:
  // Multiplies by the factor. All of a refused block becomes NaN, and any NaN the CPU's.
  __device__ void finish(float (&acc)[kCount], bool refused) const {
    bool is_number = !refused;
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) {
      acc[i] = acc[i] * of.how.factor;
      is_number = is_number && acc[i] == acc[i];
    }
    if (is_number) return;
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) acc[i] = refused ? quiet_nan<float>() : canonical(acc[i]);
  }
};

template <bool kAlone>
__global__ void __launch_bounds__(kWarp*(kAlone ? kAloneWarps : kMostWarps),
                                  kAlone ? kAloneBlocks : 2)
    sum(const __grid_constant__ SumStage of) {
  __shared__ Rooms<kAlone> rooms;
  const Team<kAlone> team;
  const unsigned warp = threadIdx.x / kWarp;
  of.spans.each_tile(team.number(), team.count(), [&](Tile<GpuSpan> tile) {
    const GpuSpan& span = tile.span;
    const std::uint64_t left = span.n - tile.number * of.block;
    const auto n = static_cast<std::uint32_t>(left < of.block ? left : of.block);
    GroupRoom<kAlone>& room = rooms.groups[kAlone ? warp : 0];
    SumTable& table = rooms.tables[warp];
    if (is_aligned(span.y))
      BlockSum<4, kAlone>{of, span, team, {team.lane()}, room, table, tile.number, n}.sum();
    else
      BlockSum<1, kAlone>{of, span, team, {team.lane()}, room, table, tile.number, n}.sum();
  });
}

Status start(const SumStage& of, Stream stream) {
  if (of.block <= kStripe)
    return launch(sum<true>, blocks_for(of.spans.tiles(), kAloneWarps), kAloneWarps * kWarp, stream,
                  of);
  const auto warps = static_cast<unsigned>(blocks_for(of.block, kStripe));
  return launch(sum<false>, of.spans.tiles(), warps * kWarp, stream, of);
}

Status onebit_decode_spans(std::uint64_t block, const GpuSpan* spans, int count,
                           const Decoding& how, std::uint32_t* flags, Stream stream) {
  if (block > OneBitKernels::kMostBlock || how.payloads.jump != 0) return cudaErrorInvalidValue;
  const auto tiles = [block](const GpuSpan& span) { return blocks_for(span.n, block); };
  const auto behind_table = [&](GpuSpan span) {
    span.payload += table_bytes(tiles(span));
    return span;
  };
  return in_batches(spans, count, behind_table, tiles, [&](const Batch<GpuSpan>& batch) {
    return start({batch, block, slot_bytes(block), how, how.adds ? 1 : kGroup, flags}, stream);
  });
}

}  // namespace

void fill_onebit_sum(Api& api) { api.onebit_decode_spans = onebit_decode_spans; }

}  // namespace gradwire::cuda
