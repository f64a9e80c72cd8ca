// Signs as bits, and lanes by bits.
#pragma once

#include "gradwire/codec/blocks.h"
#include "gradwire/codec/simd/simd_group.h"

namespace gradwire::codec {
namespace {

// Each simd_<isa>.cc defines these.

std::uint32_t sign_bits(F32 v);  // bit i is the sign of lane i
F32 by_sign(F32 v, F32 if_clear, F32 if_set);
// Selects each lane i by bit i of part k of the word.
F32 by_bits(std::uint32_t word, std::size_t k, F32 if_clear, F32 if_set);
// max(0, v) and min(0, v); NaN stays NaN.
F32 positive_part(F32 v);
F32 negative_part(F32 v);
// compress() moves the bits of `word` that the mask has together; expand() moves them back.
std::uint32_t compress(std::uint32_t word, std::uint32_t mask);
std::uint32_t expand(std::uint32_t packed, std::uint32_t mask);

std::uint32_t count_of(std::uint32_t word) {
  return static_cast<std::uint32_t>(__builtin_popcount(word));
}

constexpr std::size_t bytes_of(All) { return sizeof(std::uint32_t); }
constexpr std::size_t bytes_of(std::size_t count) { return OneBitKernels::bytes_of_bits(count); }

// Loads the bits of a group.
template <typename PartOf>
std::uint32_t load_word(const std::byte* bits, std::size_t i, PartOf part) {
  std::uint32_t word = 0;
  __builtin_memcpy(&word, bits + i / 8, bytes_of(part));
  return word;
}
template <typename PartOf>
void store_word(std::byte* bits, std::size_t i, PartOf part, std::uint32_t word) {
  __builtin_memcpy(bits + i / 8, &word, bytes_of(part));
}

std::uint32_t word_of(const Group& v) {
  std::uint32_t word = 0;
  each_part([&](std::size_t k) { word |= sign_bits(v[k]) << (k * kLanes); });
  return word;
}

}  // namespace
}  // namespace gradwire::codec
