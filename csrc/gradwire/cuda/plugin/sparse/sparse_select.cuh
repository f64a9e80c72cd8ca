// Radix select by magnitude: digit by digit from the highest, with a histogram of each digit.
#pragma once

#include "gradwire/cuda/plugin/block.cuh"
#include "gradwire/cuda/plugin/floats.cuh"
#include "gradwire/cuda/plugin/sparse/sparse.cuh"

namespace gradwire::cuda {

// Digits of a magnitude's 31 bits: 11, 10 and 10.
inline constexpr unsigned kDigitBits = 10, kFirstDigitBits = 11;

struct SelectRoom {
  std::uint32_t counts[1U << kFirstDigitBits];
  std::uint32_t digit, above, count;
};

// The k-th largest magnitude; how many of the elements equal to it are among the k largest; and how
// many of them there are in all.
struct Selected {
  std::uint32_t magnitude;
  unsigned taken, equal;
};

// Finds the digit of the k-th largest of `total` elements from the counts of all digits but 0,
// which all other elements have.
template <unsigned kBits>
__device__ void find_digit(unsigned k, unsigned total, SelectRoom& room) {
  constexpr unsigned kEach = (1U << kBits) / kUnitThreads;
  std::uint32_t counts[kEach];
  std::uint32_t mine = 0;
  const unsigned highest = (1U << kBits) - 1 - threadIdx.x * kEach;
#pragma unroll
  for (unsigned d = 0; d < kEach; ++d) mine += counts[d] = room.counts[highest - d];
  std::uint32_t above = block_sums(mine).before;
#pragma unroll
  for (unsigned d = 0; d < kEach; ++d) {
    if (highest == d) counts[d] = total - above;
    if (above < k && k <= above + counts[d]) {
      room.digit = highest - d;
      room.above = above;
      room.count = counts[d];
    }
    above += counts[d];
  }
  __syncthreads();
}

// Takes the digit that find_digit() finds from the counts in the room, which all threads can read.
template <unsigned kShift, unsigned kBits>
__device__ void take_digit(Selected& so_far, SelectRoom& room) {
  find_digit<kBits>(so_far.taken, so_far.equal, room);
  so_far = {so_far.magnitude | room.digit << kShift, so_far.taken - room.above, room.count};
  __syncthreads();
}

// Finds the next digit of the sought magnitude: the kBits bits from bit kShift on. each(see) calls
// see(bits of v) for all elements, and may leave out zeros. (Each use of v masks out the sign by
// itself: a common magnitude would stay in registers, beside v.)
template <unsigned kShift, unsigned kBits, typename Each>
__device__ void narrow(Selected& so_far, SelectRoom& room, Each each) {
  constexpr std::uint32_t kDigit = (1U << kBits) - 1;
  constexpr std::uint32_t kAbove = 0x7FFFFFFFU & ~((1U << (kShift + kBits)) - 1);
  clear(room.counts, 1U << kBits);
  __syncthreads();
  each([&](std::uint32_t v) {
    const std::uint32_t digit = v >> kShift & kDigit;
    if (digit != 0 && (v & kAbove) == so_far.magnitude) atomicAdd(room.counts + digit, 1U);
  });
  __syncthreads();
  take_digit<kShift, kBits>(so_far, room);
}

__device__ inline unsigned first_digit(std::uint32_t magnitude) {
  return magnitude >> (2 * kDigitBits);
}

// Selects the k largest of n elements by magnitude, 1 <= k <= n. The block has kUnitThreads
// threads.
template <typename Each>
__device__ Selected select_largest(unsigned n, unsigned k, SelectRoom& room, Each each) {
  Selected found{0, k, n};
  narrow<2 * kDigitBits, kFirstDigitBits>(found, room, each);
  narrow<kDigitBits, kDigitBits>(found, room, each);
  narrow<0, kDigitBits>(found, room, each);
  return found;
}

// The same where room.counts, which all threads can read, has the counts of all first digits but 0.
template <typename Each>
__device__ Selected select_counted(unsigned n, unsigned k, SelectRoom& room, Each each) {
  Selected found{0, k, n};
  take_digit<2 * kDigitBits, kFirstDigitBits>(found, room);
  narrow<kDigitBits, kDigitBits>(found, room, each);
  narrow<0, kDigitBits>(found, room, each);
  return found;
}

}  // namespace gradwire::cuda
