// onebit's decoder (codec/onebit.cc defines it): the sum of any number of payloads in one pass.
// Four of them are added before others are, as the definition says; where none of the four has a
// mask they have but 16 sums, which are computed once a block and looked up by the elements' signs.
#include "gradwire/cuda/plugin/bits.cuh"
#include "gradwire/cuda/plugin/floats.cuh"
#include "gradwire/cuda/plugin/functions.h"
#include "gradwire/cuda/plugin/share.cuh"
#include "gradwire/cuda/plugin/team.cuh"

namespace gradwire::cuda {
namespace {

using codec::OneBitKernels;

constexpr unsigned kGroup = OneBitKernels::kGroup;  // payloads that are added before others are
constexpr unsigned kAtOnce = 64;                    // payloads: a multiple of that
constexpr unsigned kCount = 32;                     // elements of a thread
constexpr unsigned kSegment = kWarp * kCount;       // of a warp
constexpr unsigned kMostWarps = OneBitKernels::kMostBlock / kSegment;  // that share a block
constexpr unsigned kAloneWarps = 4;  // in a block of threads, where each has blocks of its own
constexpr std::uint32_t kHeader = 2 * sizeof(float);

struct Sum {
  Slots payloads[kAtOnce];
  unsigned count;
  std::uint64_t n, block, slot_bytes;
  float* y;
  bool add;
  std::uint32_t* flags;
};

// ---- What lies in a slot -----------------------------------------------------------------------

// One unit's bytes.
struct Unit {
  const std::byte* at;
  std::uint64_t bytes;
  bool whole;  // all of them have to be its

  __device__ bool holds(std::uint64_t needed) const {
    return whole ? needed == bytes : needed <= bytes;
  }
  __device__ std::uint64_t behind_header() const { return bytes < kHeader ? 0 : bytes - kHeader; }
  // The word number `index` there.
  __device__ std::uint32_t word(std::uint32_t index) const {
    const std::uint64_t begin = kHeader + std::uint64_t{4} * index;
    return begin < bytes ? load_word(at + begin, bytes - begin) : 0;
  }
};

__device__ Unit unit_of(const Slots& payload, std::uint64_t unit, std::uint64_t slot_bytes) {
  if (payload.offsets == nullptr) return {payload.data + unit * slot_bytes, slot_bytes, false};
  const std::uint64_t begin = payload.offsets[unit];
  return {payload.data + begin, payload.offsets[unit + 1] - begin, true};
}

// What a thread knows of a payload's block. Of a masked one `signs` is what is behind the header,
// until it is unpacked.
struct Plane {
  float plus, minus;
  std::uint32_t signs;

  __device__ bool masked() const { return is_negative(plus); }
  __device__ bool has_runs() const { return masked() && !is_negative(minus); }
};

__device__ Plane load_plane(const Unit& unit, unsigned rank) {
  const auto value = [&](std::uint64_t at) {
    return at < unit.bytes ? __uint_as_float(load_word(unit.at + at, unit.bytes - at)) : 0;
  };
  return {value(0), value(sizeof(float)), unit.word(rank)};
}

// Payloads that are added before others are.
struct Group {
  Plane planes[kGroup];
  unsigned count;
  unsigned refused;  // a bit for each; of a masked one, until it is unpacked: if it had no mask
};

// ---- Masks -------------------------------------------------------------------------------------

// A team's room: words of signs and of masks, by payload of a group.
template <bool kAlone>
struct WordRoom {
  static constexpr unsigned kWords = kWarp * (kAlone ? 1 : kMostWarps);
  std::uint32_t signs[kGroup][kWords + 1];  // first: the bytes of runs
  std::uint32_t present[kGroup][kWords];
  std::uint32_t run_bytes[kGroup];
};

__device__ void set_bits(std::uint32_t* words, std::uint32_t begin, std::uint32_t end) {
  for (std::uint32_t at = begin; at < end; at = at / 32 * 32 + 32) {
    const std::uint32_t count = end - at / 32 * 32;
    words[at / 32] |= (count >= 32 ? ~0U : (1U << count) - 1) & (~0U << at % 32);
  }
}

// A mask of n bits, which are 0, of its runs. Returns how many of the `available` bytes they took;
// 0 where they are no runs of n elements in all, or as long as the mask.
__device__ std::uint32_t read_runs(const std::uint32_t* runs, std::uint64_t available,
                                   std::uint32_t n, std::uint32_t* mask) {
  const std::uint32_t most = most_run_bytes(n);
  const std::uint32_t bits = 8 * (available < most ? static_cast<std::uint32_t>(available) : most);
  std::uint32_t read = 0, done = 0;  // one more than of the mask, as the first run is
  for (bool set = false; done < n + 1; set = !set) {
    if (read >= bits) return 0;
    const std::uint32_t code = bits_at(runs, read);
    const auto zeros = static_cast<std::uint32_t>(__ffs(static_cast<int>(code | 1U << 15))) - 1;
    if (zeros == 15 || read + 2 * zeros + 1 > bits) return 0;
    const std::uint32_t length = 1U << zeros | (code >> (zeros + 1) & ((1U << zeros) - 1));
    if (length > n + 1 - done) return 0;
    if (set) set_bits(mask, done - 1, done - 1 + length);
    done += length;
    read += 2 * zeros + 1;
  }
  return bytes_of_bits(read);
}

// One plane's mask and signs, of which this thread has a word.
template <bool kAlone>
__device__ bool unpack(const Unit& unit, std::uint32_t n, std::uint32_t run_bytes,
                       Team<kAlone> team, std::uint32_t present, Plane& plane) {
  const auto packed = static_cast<std::uint32_t>(__popc(present));
  const auto counts = team.scan(packed, Plus{});
  const std::uint64_t mask_end = kHeader + (plane.has_runs() ? run_bytes : bytes_of_bits(n));
  const std::uint64_t end = mask_end + bytes_of_bits(counts.all);
  const bool good = unit.holds(end) && (!plane.has_runs() || run_bytes > 0);
  plane.signs = 0;
  if (good && packed > 0) {
    const std::uint64_t begin = mask_end + counts.before / 8;
    std::uint64_t bits = load_word(unit.at + begin, end - begin);
    if (counts.before % 8 + packed > 32)
      bits |= static_cast<std::uint64_t>(unit.at[begin + 4]) << 32;
    plane.signs = expand(static_cast<std::uint32_t>(bits >> counts.before % 8), present);
  }
  plane.plus = -plane.plus;
  plane.minus = -__uint_as_float(magnitude_bits(plane.minus));
  return good;
}

// A group some of whose planes are masked, into the room: of each a word of signs, and one of the
// mask.
template <bool kAlone, typename UnitAt>
__device__ void unpack(Group& group, std::uint32_t n, Team<kAlone> team, WordRoom<kAlone>& room,
                       UnitAt unit_at) {
  const unsigned rank = team.rank();
  team.sync();  // nobody reads any more what is there
#pragma unroll
  for (unsigned p = 0; p < kGroup; ++p) {
    room.signs[p][rank] = group.planes[p].signs;
    room.present[p][rank] = 0;
  }
  team.sync();
#pragma unroll
  for (unsigned p = 0; p < kGroup; ++p)
    if (rank == p && p < group.count && group.planes[p].has_runs())
      room.run_bytes[p] = read_runs(room.signs[p], unit_at(p).behind_header(), n, room.present[p]);
  team.sync();
#pragma unroll
  for (unsigned p = 0; p < kGroup; ++p) {
    Plane& plane = group.planes[p];
    std::uint32_t present = word_of_first(n, rank);
    if (p < group.count && plane.masked()) {
      present &= plane.has_runs() ? room.present[p][rank] : plane.signs;
      const bool good = unpack(unit_at(p), n, room.run_bytes[p], team, present, plane);
      group.refused = (group.refused & ~(1U << p)) | (good ? 0 : 1U << p);
    }
    room.present[p][rank] = present;
  }
  team.sync();  // all have read what the signs replace
#pragma unroll
  for (unsigned p = 0; p < kGroup; ++p) room.signs[p][rank] = group.planes[p].signs;
  team.sync();
}

// ---- Sums of a group ---------------------------------------------------------------------------

// The signs of four payloads for each of 32 elements, and the sums that they stand for. Belongs to
// a warp: a word of each of its lanes.
struct SumTable {
  struct alignas(16) Fours {
    std::uint32_t at[kGroup];  // of element e: four bits of at[e % 4] from 4 (e / 4) on
  };
  Fours signs[kWarp];
  float sums[1U << kGroup];
};

// The masked bits of b beside those of a; and those `by` further on.
__device__ void exchange(std::uint32_t& a, std::uint32_t& b, int by, std::uint32_t mask) {
  const std::uint32_t low = (a & mask) | ((b & mask) << by);
  b = ((a >> by) & mask) | (b & ~mask);
  a = low;
}

__device__ void fill(SumTable& table, const Group& group, unsigned lane) {
  SumTable::Fours fours;
#pragma unroll
  for (unsigned p = 0; p < kGroup; ++p) fours.at[p] = group.planes[p].signs;
  exchange(fours.at[0], fours.at[2], 2, 0x33333333U);
  exchange(fours.at[1], fours.at[3], 2, 0x33333333U);
  exchange(fours.at[0], fours.at[1], 1, 0x55555555U);
  exchange(fours.at[2], fours.at[3], 1, 0x55555555U);
  float sum = 0;
#pragma unroll
  for (unsigned p = 0; p < kGroup; ++p) {
    const float value = (lane >> p & 1U) != 0 ? group.planes[p].minus : group.planes[p].plus;
    if (p < group.count) sum = p == 0 ? value : sum + value;
  }
  __syncwarp();  // nobody reads any more what is there
  table.signs[lane] = fours;
  if (lane < (1U << kGroup)) table.sums[lane] = sum;
  __syncwarp();
}

template <unsigned kWide>
__device__ void add_table(const SumTable& table, unsigned lane, float (&acc)[kCount]) {
#pragma unroll
  for (unsigned i = 0; i < kCount; i += kWide) {
    if constexpr (kWide == kGroup) {
      const SumTable::Fours fours = table.signs[i + lane / 8];
#pragma unroll
      for (unsigned k = 0; k < kWide; ++k)
        acc[i + k] = acc[i + k] + table.sums[fours.at[k] >> (lane % 8 * 4) & 15U];
    } else {
      acc[i] = acc[i] + table.sums[table.signs[i].at[lane % 4] >> (lane / 4 * 4) & 15U];
    }
  }
}

// One after the other: where a mask leaves an element out, +0.
template <unsigned kWide, bool kAlone>
__device__ void add_masked(const Group& group, const WordRoom<kAlone>& room, unsigned first_word,
                           Share<kWarp, kCount, kWide> share, float (&acc)[kCount]) {
#pragma unroll
  for (unsigned i = 0; i < kCount; ++i) {
    const unsigned element = share.element(i), word = first_word + element / 32;
    float sum = 0;
#pragma unroll
    for (unsigned p = 0; p < kGroup; ++p) {
      const std::uint32_t signs = room.signs[p][word] >> element % 32;
      const std::uint32_t present = room.present[p][word] >> element % 32;
      const float mean = (signs & 1U) != 0 ? group.planes[p].minus : group.planes[p].plus;
      const float value = (present & 1U) != 0 ? mean : 0;
      if (p < group.count) sum = p == 0 ? value : sum + value;
    }
    acc[i] = acc[i] + sum;
  }
}

// ---- Blocks ------------------------------------------------------------------------------------

template <bool kAlone>
struct Rooms {
  WordRoom<kAlone> words[kAlone ? kAloneWarps : 1];
  SumTable tables[kAlone ? kAloneWarps : kMostWarps];
};

template <unsigned kWide, bool kAlone>
struct Block {
  const Sum& of;
  Team<kAlone> team;
  Share<kWarp, kCount, kWide> share;
  WordRoom<kAlone>& room;
  SumTable& table;
  std::uint64_t unit;
  std::uint32_t n;  // of the block

  __device__ Unit unit_at(unsigned p) const { return unit_of(of.payloads[p], unit, of.slot_bytes); }

  // Those from the p-th payload on.
  __device__ Group load(unsigned first) const {
    Group group{};
    group.count = of.count <= first ? 0 : of.count - first < kGroup ? of.count - first : kGroup;
#pragma unroll
    for (unsigned p = 0; p < kGroup; ++p) {
      if (p >= group.count) continue;
      const Unit here = unit_at(first + p);
      group.planes[p] = load_plane(here, team.rank());
      group.refused |= here.holds(kHeader + bytes_of_bits(n)) ? 0 : 1U << p;
    }
    return group;
  }

  // Returns the flags that it sets.
  __device__ std::uint32_t add(Group& group, unsigned first, float (&acc)[kCount]) const {
    bool masked = false;
#pragma unroll
    for (unsigned p = 0; p < kGroup; ++p) masked = masked || group.planes[p].masked();
    if (masked) unpack(group, n, team, room, [&](unsigned p) { return unit_at(first + p); });
    std::uint32_t flags = group.refused != 0 ? kRefused : 0U;
#pragma unroll
    for (unsigned p = 0; p < kGroup; ++p) {
      Plane& plane = group.planes[p];
      if (is_finite(plane.plus) && is_finite(plane.minus)) continue;
      plane.plus = plane.minus = quiet_nan<float>();
      flags |= kNotFinite;
    }
    if (masked) {
      add_masked(group, room, team.warp() * kWarp, share, acc);
    } else {
      fill(table, group, team.lane());
      add_table<kWide>(table, team.lane(), acc);
    }
    return flags;
  }

  __device__ void sum() const {
    const std::uint32_t segment = team.warp() * kSegment;
    const std::uint32_t inside = n > segment ? n - segment : 0;
    float* const y = of.y + unit * of.block + segment;
    float acc[kCount];
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) acc[i] = -0.0F;  // to which anything adds up unchanged
    if (of.add) share.load(y, inside, acc);
    std::uint32_t flags = 0;
    Group group = load(0);
    for (unsigned first = 0; first < of.count; first += kGroup) {
      const Group next = load(first + kGroup);  // on its way while the one before is added
      flags |= add(group, first, acc);
      group = next;
    }
    const bool refused = (flags & kRefused) != 0;
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) acc[i] = refused ? quiet_nan<float>() : canonical(acc[i]);
    share.store(y, inside, acc);
    if (flags != 0 && team.rank() == 0) set_flag(of.flags, flags);
  }
};

template <unsigned kWide, bool kAlone>
__global__ void __launch_bounds__(kWarp*(kAlone ? kAloneWarps : kMostWarps))
    sum(const __grid_constant__ Sum of) {
  __shared__ Rooms<kAlone> rooms;
  const Team<kAlone> team;
  const unsigned warp = threadIdx.x / kWarp;
  for (std::uint64_t unit = team.number(); unit * of.block < of.n; unit += team.count()) {
    const std::uint64_t left = of.n - unit * of.block;
    const Block<kWide, kAlone> block{of,
                                     team,
                                     {team.lane()},
                                     rooms.words[kAlone ? warp : 0],
                                     rooms.tables[warp],
                                     unit,
                                     static_cast<std::uint32_t>(left < of.block ? left : of.block)};
    block.sum();
  }
}

template <unsigned kWide>
Status start(const Sum& of, Stream stream) {
  const std::uint64_t units = blocks_for(of.n, of.block);
  if (of.block <= kSegment)
    return launch(sum<kWide, true>, blocks_for(units, kAloneWarps), kAloneWarps * kWarp, stream,
                  of);
  const auto warps = static_cast<unsigned>(blocks_for(of.block, kSegment));
  return launch(sum<kWide, false>, units, warps * kWarp, stream, of);
}

Status onebit_sum(const Slots* payloads, int count, std::uint64_t n, std::uint64_t block, float* y,
                  bool add, std::uint32_t* flags, Stream stream) {
  if (count < 1 || block > OneBitKernels::kMostBlock) return cudaErrorInvalidValue;
  Sum of{{}, 0, n, block, aligned(OneBitKernels::most_bytes(block)), y, add, flags};
  const auto all = static_cast<unsigned>(count);
  for (unsigned first = 0; first < all; first += kAtOnce) {
    of.count = all - first < kAtOnce ? all - first : kAtOnce;
    for (unsigned p = 0; p < of.count; ++p) of.payloads[p] = payloads[first + p];
    of.add = add || first > 0;
    const Status status = is_aligned(y) ? start<4>(of, stream) : start<1>(of, stream);
    if (status != 0) return status;
  }
  return 0;
}

}  // namespace

void fill_onebit_sum(Api& api) { api.onebit_sum = onebit_sum; }

}  // namespace gradwire::cuda
