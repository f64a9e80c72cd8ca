// The inner loops of the codecs that work block by block: int8.cc and onebit.cc define what they
// compute.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradwire::codec {

// Where a run's random numbers are on the one sequence that belongs to seed.
struct Dice {
  std::uint64_t seed = 0;
  std::uint64_t call = 0;
  std::uint64_t element = 0;  // the run's first
};

struct Int8Kernels {
  static constexpr float kMostScale = 0x1.FFFFFEp120F;  // of which 128 are finite

  static constexpr std::size_t bytes(std::size_t n, std::size_t block) {
    return n + (n + block - 1) / block * sizeof(float);
  }

  // residual, dice (then it rounds to nearest) and error may be null.
  void (*encode)(const float* x, const float* residual, std::size_t n, std::size_t block,
                 const Dice* dice, std::byte* out, float* error) noexcept;
  // Whether every scale is one that encode() writes for finite values; a block of another is NaN.
  bool (*decode)(const std::byte* in, std::size_t n, std::size_t block, float* y) noexcept;
  bool (*decode_add)(const std::byte* in, std::size_t n, std::size_t block, float* y) noexcept;
};

}  // namespace gradwire::codec
