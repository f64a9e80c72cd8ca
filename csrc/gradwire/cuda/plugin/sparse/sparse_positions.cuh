// Writes the positions of the elements of a unit that are sent, in the layout that codec/sparse.cc
// chooses.
#pragma once

#include "gradwire/cuda/plugin/block.cuh"
#include "gradwire/cuda/plugin/sparse/sparse.cuh"

namespace gradwire::cuda {

inline constexpr unsigned kMostPositionBytes = codec::most_position_bytes(kUnit);

// A block's shared memory.
struct PositionRoom {
  std::uint32_t zeros[kMostLowBits + 1];  // in the codes of all gaps, for each `low`
};

struct WrittenPositions {
  unsigned count;   // hits of the unit
  unsigned before;  // hits before the thread's word
  unsigned bytes;   // that were written
};

// Calls body(gap - 1, index) for each set bit of the thread's word. `next` is the index of the last
// set bit before that word, plus 1; 0 where there is none.
template <typename Body>
__device__ void each_gap(std::uint32_t word, unsigned next, Body body) {
  for (; word != 0; word &= word - 1) {
    const unsigned index =
        threadIdx.x * kWarp + static_cast<unsigned>(__ffs(static_cast<int>(word))) - 1;
    body(index - next, index);
    next = index + 1;
  }
}

// Adds the zeros in the codes of the thread's gaps to room.zeros, for each `low`.
__device__ inline void count_zeros(std::uint32_t word, unsigned next, PositionRoom& room) {
  if (__any_sync(kAllLanes, word != 0) == 0) return;
  for (unsigned low = 0; low <= kMostLowBits; ++low) {
    std::uint32_t zeros = 0;
    each_gap(word, next, [&](unsigned gap, unsigned) { zeros += gap >> low; });
    zeros = __reduce_add_sync(kAllLanes, zeros);
    if (threadIdx.x % kWarp == 0) atomicAdd(room.zeros + low, zeros);
  }
}

struct GapChoice {
  unsigned low, bits;
};

// Searches for the shortest code in the same steps as the CPU.
__device__ inline GapChoice best_gap_code(const PositionRoom& room, unsigned count, unsigned n) {
  const auto code_of = [&](unsigned low) {
    return GapChoice{low, room.zeros[low] + count * (1 + low)};
  };
  GapChoice best = code_of(31 - static_cast<unsigned>(__clz(static_cast<int>(n / count))));
  while (best.low < kMostLowBits && code_of(best.low + 1).bits < best.bits)
    best = code_of(best.low + 1);
  while (best.low > 0 && code_of(best.low - 1).bits <= best.bits) best = code_of(best.low - 1);
  return best;
}

__device__ inline void write_gaps(std::uint32_t word, unsigned next, unsigned low, unsigned at,
                                  std::uint32_t* out) {
  unsigned bits = 0;
  each_gap(word, next, [&](unsigned gap, unsigned) { bits += (gap >> low) + 1 + low; });
  at += block_sums(bits).before;
  each_gap(word, next, [&](unsigned gap, unsigned) {
    at += gap >> low;
    put_bits(out, at, (gap & ((1U << low) - 1)) << 1 | 1, 1 + low);
    at += 1 + low;
  });
}

// Writes the positions in the shortest layout from the front of `out`, which is 0 and has room for
// kMostPositionBytes and one word more. Returns their bytes.
__device__ inline unsigned write_some(std::uint32_t word, unsigned next, unsigned before,
                                      unsigned count, unsigned n, const PositionRoom& room,
                                      std::uint32_t* out) {
  const GapChoice code = best_gap_code(room, count, n);
  const unsigned bytes_of_count = count < kShortCount ? 1 : 2;
  const unsigned list = bytes_of_count + 2 * count, gaps = bytes_of_count + (code.bits + 7) / 8,
                 bitmap = (n + 7) / 8;
  const unsigned body = 8 * (1 + bytes_of_count);
  const auto begin = [&](codec::PositionFormat format, unsigned low) {
    const unsigned low_count =
        count < kShortCount ? count
                            : (count & (kShortCount - 1)) | kShortCount | count / kShortCount << 8;
    if (threadIdx.x == 0) put_bits(out, 0, head_of(format, low) | low_count << 8, 24);
  };
  if (list <= gaps && list <= bitmap) {
    begin(codec::PositionFormat::kList, 0);
    each_gap(word, next,
             [&](unsigned, unsigned index) { put_bits(out, body + 16 * before++, index, 16); });
    return 1 + list;
  }
  if (gaps <= bitmap) {
    begin(codec::PositionFormat::kGaps, code.low);
    write_gaps(word, next, code.low, body, out);
    return 1 + gaps;
  }
  if (threadIdx.x == 0) put_bits(out, 0, head_of(codec::PositionFormat::kBitmap), 8);
  put_bits(out, 8 + 32 * threadIdx.x, word, 32);
  return 1 + bitmap;
}

// Writes the positions of a unit of n elements to `out`, which is 0 before and may be read after a
// barrier. `word` is the thread's word of the mask, 0 beyond n.
__device__ inline WrittenPositions write_positions(std::uint32_t word, unsigned n,
                                                   PositionRoom& room, std::uint32_t* out) {
  if (threadIdx.x <= kMostLowBits) room.zeros[threadIdx.x] = 0;
  const auto sums = block_sums(static_cast<std::uint32_t>(__popc(word)));
  const unsigned count = sums.all;
  if (count == 0 || count == n) {
    const auto format = count == 0 ? codec::PositionFormat::kNone : codec::PositionFormat::kAll;
    if (threadIdx.x == 0) put_bits(out, 0, head_of(format), 8);
    return {count, sums.before, 1};
  }
  const unsigned end =
      word == 0 ? 0
                : (threadIdx.x + 1) * kWarp - static_cast<unsigned>(__clz(static_cast<int>(word)));
  const unsigned next = block_scan(end, 0U, Larger{}).before;
  count_zeros(word, next, room);
  __syncthreads();
  return {count, sums.before, write_some(word, next, sums.before, count, n, room, out)};
}

}  // namespace gradwire::cuda
