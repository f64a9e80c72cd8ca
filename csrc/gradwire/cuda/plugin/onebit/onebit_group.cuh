// Reads blocks of onebit payloads (codec/onebit.cc defines them) in groups. The payloads of a group
// are added to each other before their sum is added to others.
#pragma once

#include "gradwire/cuda/plugin/bits.cuh"
#include "gradwire/cuda/plugin/floats.cuh"
#include "gradwire/cuda/plugin/onebit/onebit.cuh"
#include "gradwire/cuda/plugin/team.cuh"

namespace gradwire::cuda::onebit {

inline constexpr unsigned kGroup = OneBitKernels::kGroup;

// The slot of one unit, which is aligned and has room for any block.
struct PayloadSlot {
  const std::byte* at;
  std::uint64_t bytes;
};

// The means of a block as they are sent. Their signs also say whether the block has a mask, and
// whether that is written as runs.
struct alignas(2 * sizeof(float)) SentMeans {
  float plus, minus;

  __device__ bool masked() const { return is_negative(plus); }
  __device__ bool has_runs() const { return masked() && !is_negative(minus); }
  __device__ bool finite() const { return is_finite(plus) && is_finite(minus); }
  // Returns whether all is as in nearly every block: no mask, and finite.
  __device__ bool usual() const {
    return __float_as_uint(plus) < kInfinityBits && magnitude_bits(minus) < kInfinityBits;
  }

  // Returns the values that elements decode to; they are never -0, as on CPUs.
  __device__ SentMeans decoded() const {
    if (!finite()) return {quiet_nan<float>(), quiet_nan<float>()};
    if (masked()) return {0 - plus, 0 - __uint_as_float(magnitude_bits(minus))};
    return {0 + plus, 0 + minus};
  }
};

// A thread's part of a payload's block: the header, and one word of the bytes behind it.
struct Plane {
  SentMeans means;
  std::uint32_t word;
};

// Loads the thread's part of a block of n elements.
__device__ inline Plane load_slot(const std::byte* slot, std::uint32_t n, unsigned rank) {
  const auto* const words = reinterpret_cast<const std::uint32_t*>(slot + kHeader);
  return {*reinterpret_cast<const SentMeans*>(slot), rank < (n + 31) / 32 ? words[rank] : 0};
}

// One block of each payload of a group.
struct PayloadGroup {
  Plane planes[kGroup];
  unsigned count;
};

// ---- Masks -------------------------------------------------------------------------------------

// A team's shared memory for a group: for each payload its means and, for each thread, one word of
// signs and one word of the mask.
template <bool kAlone>
struct GroupRoom {
  static constexpr unsigned kWords = kWarp * (kAlone ? 1 : kMostWarps);
  SentMeans sent[kGroup];
  SentMeans means[kGroup];                  // decoded
  std::uint32_t signs[kGroup][kWords + 1];  // at first the words behind the header
  std::uint32_t present[kGroup][kWords];
  std::uint32_t run_bytes[kGroup];
};

__device__ inline void set_bits(std::uint32_t* words, std::uint32_t begin, std::uint32_t end) {
  for (std::uint32_t at = begin; at < end; at = at / 32 * 32 + 32) {
    const std::uint32_t count = end - at / 32 * 32;
    words[at / 32] |= (count >= 32 ? ~0U : (1U << count) - 1) & (~0U << at % 32);
  }
}

// Sets the bits of a mask of n bits, all 0 before, from its runs. Returns how many of the
// `available` bytes the runs take; 0 where they do not cover exactly n elements, or are as long as
// a bitmap.
__device__ inline std::uint32_t read_runs(const std::uint32_t* runs, std::uint64_t available,
                                          std::uint32_t n, std::uint32_t* mask) {
  const std::uint32_t most = most_run_bytes(n);
  const std::uint32_t bits = 8 * (available < most ? static_cast<std::uint32_t>(available) : most);
  std::uint32_t read = 0, done = 0;  // done: bits + 1, since the first run is coded as one longer
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

// Turns the thread's word of a payload with a mask into a word of signs and one of the mask. Where
// the mask is written as runs, `present` holds its word already. Returns whether the payload is
// valid.
template <bool kAlone>
__device__ bool unpack(const PayloadSlot& slot, std::uint32_t n, SentMeans sent,
                       std::uint32_t run_bytes, Team<kAlone> team, std::uint32_t& signs,
                       std::uint32_t& present) {
  if (!sent.has_runs()) present &= signs;
  const auto packed = static_cast<std::uint32_t>(__popc(present));
  const auto counts = team.scan(packed, Plus{});
  const std::uint64_t mask_end = kHeader + (sent.has_runs() ? run_bytes : bytes_of_bits(n));
  const std::uint64_t end = mask_end + bytes_of_bits(counts.all);
  const bool good = end <= slot.bytes && (!sent.has_runs() || run_bytes > 0);
  signs = 0;
  if (good && packed > 0) {
    const std::uint64_t begin = mask_end + counts.before / 8;
    std::uint64_t bits = load_word(slot.at + begin, end - begin);
    if (counts.before % 8 + packed > 32)
      bits |= static_cast<std::uint64_t>(slot.at[begin + 4]) << 32;
    signs = expand(static_cast<std::uint32_t>(bits >> counts.before % 8), present);
  }
  return good;
}

// Unpacks a group, some of whose payloads have masks, into the room. Returns the flags to set. It
// handles one payload after the other, which needs fewer registers than all at once.
template <bool kAlone, typename SlotAt>
__device__ std::uint32_t unpack(const PayloadGroup& group, std::uint32_t n, Team<kAlone> team,
                                GroupRoom<kAlone>& room, SlotAt slot_at) {
  const unsigned rank = team.rank();
  team.sync();  // nobody reads the old contents any more
#pragma unroll
  for (unsigned p = 0; p < kGroup; ++p) {
    const Plane& plane = group.planes[p];
    room.signs[p][rank] = plane.word;
    room.present[p][rank] = plane.means.has_runs() ? 0 : word_of_first(n, rank);
    if (rank == 0) room.sent[p] = plane.means;
  }
  team.sync();
  if (rank < group.count && room.sent[rank].has_runs())
    room.run_bytes[rank] =
        read_runs(room.signs[rank], slot_at(rank).bytes - kHeader, n, room.present[rank]);
  team.sync();
  std::uint32_t flags = 0;
#pragma unroll 1
  for (unsigned p = 0; p < group.count; ++p) {
    const SentMeans sent = room.sent[p];
    bool good = true;
    if (sent.masked())
      good = unpack(slot_at(p), n, sent, room.run_bytes[p], team, room.signs[p][rank],
                    room.present[p][rank]);
    flags |= (good ? 0U : kRefused) | (sent.finite() ? 0U : kNotFinite);
    if (rank == 0) room.means[p] = sent.decoded();
  }
  team.sync();
  return flags;
}

}  // namespace gradwire::cuda::onebit
