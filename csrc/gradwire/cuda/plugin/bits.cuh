// Bit strings, lowest bit first, of which onebit's payloads consist (codec/simd/simd_runs.h).
#pragma once

#include "gradwire/codec/blocks.h"
#include "gradwire/cuda/plugin/gpu.cuh"

namespace gradwire::cuda {

// compress() moves the bits of `word` that are in the mask together, into the lowest bits; expand()
// moves them back.
__device__ inline std::uint32_t compress(std::uint32_t word, std::uint32_t mask) {
  std::uint32_t packed = 0;
  for (std::uint32_t next = 1; mask != 0; mask &= mask - 1, next <<= 1)
    if ((word & mask & -mask) != 0) packed |= next;
  return packed;
}
__device__ inline std::uint32_t expand(std::uint32_t packed, std::uint32_t mask) {
  std::uint32_t word = 0;
  for (; mask != 0; mask &= mask - 1, packed >>= 1)
    if ((packed & 1U) != 0) word |= mask & -mask;
  return word;
}

constexpr std::uint32_t bytes_of_bits(std::uint32_t n) {
  return static_cast<std::uint32_t>(codec::OneBitKernels::bytes_of_bits(n));
}
// Returns the most bytes that the runs of a mask of n bits may take: one less than its bitmap.
constexpr std::uint32_t most_run_bytes(std::uint32_t n) { return bytes_of_bits(n) - 1; }

// Returns a mask of the bits of word `index` that are among the string's first n bits.
__device__ inline std::uint32_t word_of_first(std::uint32_t n, std::uint32_t index) {
  if (32 * index >= n) return 0;
  const std::uint32_t count = n - 32 * index;
  return count >= 32 ? ~0U : (1U << count) - 1;
}

// Writes the lowest `count` bits of `bits` from bit `at` on, where the words are 0. Several threads
// may write to a word at once.
__device__ inline void put_bits(std::uint32_t* words, std::uint32_t at, std::uint32_t bits,
                                std::uint32_t count) {
  if (bits == 0) return;
  const std::uint32_t shift = at % 32;
  atomicOr(words + at / 32, bits << shift);
  if (shift + count > 32) atomicOr(words + at / 32 + 1, bits >> (32 - shift));
}

// Returns the 32 bits from bit `at` on.
__device__ inline std::uint32_t bits_at(const std::uint32_t* words, std::uint32_t at) {
  return __funnelshift_r(words[at / 32], words[at / 32 + 1], at % 32);
}

// Returns the first four of `bytes` bytes, at any address; zeros stand for those that are missing.
__device__ inline std::uint32_t load_word(const std::byte* at, std::uint64_t bytes) {
  if (bytes >= 4 && reinterpret_cast<std::uintptr_t>(at) % 4 == 0)
    return *reinterpret_cast<const std::uint32_t*>(at);
  std::uint32_t word = 0;
  for (unsigned i = 0; i < 4 && i < bytes; ++i)
    word |= static_cast<std::uint32_t>(at[i]) << (8 * i);
  return word;
}

// Transposes the words of a warp: bit i of lane l becomes bit l of lane i.
__device__ inline std::uint32_t transpose(std::uint32_t word) {
  std::uint32_t low = 0x0000FFFFU;
#pragma unroll
  for (unsigned by = kWarp / 2; by > 0; by /= 2, low ^= low << by) {
    const std::uint32_t other = __shfl_xor_sync(kAllLanes, word, by);
    const bool upper = (threadIdx.x & by) != 0;
    const std::uint32_t keep = upper ? ~low : low;
    word = (word & keep) | (__funnelshift_r(other, other, upper ? by : kWarp - by) & ~keep);
  }
  return word;
}

// The Elias gamma code of a run's length (codec/onebit.cc): floor(log2(length)), the number of the
// code's bits, and the code.
__device__ inline std::uint32_t run_digits(std::uint32_t length) {
  return 31U - static_cast<std::uint32_t>(__clz(static_cast<int>(length)));
}
__device__ inline std::uint32_t run_size(std::uint32_t length) {
  return 2 * run_digits(length) + 1;
}
__device__ inline std::uint32_t run_code(std::uint32_t length) {
  const std::uint32_t digits = run_digits(length);
  return (length << 1 | 1U) << digits & ((2U << 2 * digits) - 1);
}

}  // namespace gradwire::cuda
