// The inner loops of the codecs that work block by block: int8.cc, int4.cc, onebit.cc, threshold.cc
// and topk.cc define what they compute.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace gradwire::codec {

// Where a span's random numbers begin: random rounding depends on nothing else.
struct RandomPosition {
  std::uint64_t seed = 0;
  std::uint64_t call = 0;
  std::uint64_t element = 0;  // the index of the span's first element in its array
};

struct Int8Kernels {
  static constexpr float kMostScale = 0x1.FFFFFEp120F;  // FLT_MAX / 128: 128 times it is finite

  static constexpr std::size_t bytes(std::size_t n, std::size_t block) {
    return n + (n + block - 1) / block * sizeof(float);
  }

  // residual, position (null: round to nearest) and error may be null.
  void (*encode)(const float* x, const float* residual, std::size_t n, std::size_t block,
                 const RandomPosition* position, std::byte* out, float* error) noexcept;
  // Both return whether every scale is one that encode() writes for finite values; a block with any
  // other scale becomes NaN.
  bool (*decode)(const std::byte* in, std::size_t n, std::size_t block, float* y) noexcept;
  bool (*decode_add)(const std::byte* in, std::size_t n, std::size_t block, float* y) noexcept;
};

struct Int4Kernels {
  static constexpr std::size_t kUnit = 1024;  // elements; blocks have 32, 64 or 128 of them
  static constexpr std::size_t kScaleBytes = 2;
  static constexpr float kMostScale = 0x1.FEp127F;  // the largest bfloat16

  // What each code stands for, in units of the scale.
  using Levels = std::array<float, 16>;
  static constexpr Levels kNearest = {0.0F,          0.0857864618F, 0.177124381F,  0.275255084F,
                                      0.381965995F,  0.5F,          0.633974612F,  0.792893231F,
                                      1.0F,          -0.792893231F, -0.633974612F, -0.5F,
                                      -0.381965995F, -0.275255084F, -0.177124381F, -0.0857864618F};
  static constexpr Levels kEqual = {
      0 / 7.0F, 1 / 7.0F,  2 / 7.0F,  3 / 7.0F,  4 / 7.0F,  5 / 7.0F,  6 / 7.0F,  7 / 7.0F,
      7 / 7.0F, -7 / 7.0F, -6 / 7.0F, -5 / 7.0F, -4 / 7.0F, -3 / 7.0F, -2 / 7.0F, -1 / 7.0F};

  static constexpr std::size_t bytes(std::size_t n, std::size_t block) {
    const std::size_t last = n % 32;
    return (n + block - 1) / block * kScaleBytes + n / 32 * 16 + (last < 16 ? last : 16);
  }

  // As Int8Kernels. The levels are kEqual where a position was given, else kNearest.
  void (*encode)(const float* x, const float* residual, std::size_t n, std::size_t block,
                 const RandomPosition* position, std::byte* out, float* error) noexcept;
  bool (*decode)(const std::byte* in, std::size_t n, std::size_t block, const Levels& levels,
                 float* y) noexcept;
  bool (*decode_add)(const std::byte* in, std::size_t n, std::size_t block, const Levels& levels,
                     float* y) noexcept;
};

// One block of a one-bit payload, in the form in which it is added.
struct OneBitPlane {
  const std::byte* signs;    // one bit per element, the first in the lowest bit
  const std::byte* present;  // one bit per element, set where it is not 0; null: all are set
  float plus, minus;
};

struct OneBitKernels {
  static constexpr std::size_t kGroup = 4;  // planes that are summed before they join the total
  static constexpr std::size_t kMostBlock = 8192;  // elements

  static constexpr std::size_t bytes_of_bits(std::size_t n) { return (n + 7) / 8; }
  // Returns the most bytes of n elements in one block: two means, mask and signs.
  static constexpr std::size_t most_bytes(std::size_t n) {
    return 2 * sizeof(float) + 2 * bytes_of_bits(n);
  }

  // Returns the bytes written. residual and error may be null.
  std::size_t (*encode)(const float* x, const float* residual, std::size_t n, std::size_t block,
                        std::byte* out, float* error) noexcept;
  // y := the sum of `count` planes (1 to kGroup), or y := y + that sum, for n elements.
  void (*sum)(const OneBitPlane* planes, std::size_t count, bool add, float* y,
              std::size_t n) noexcept;
  // Moves packed bit k to where the mask has its k-th set bit; 0 where the `bytes` run out.
  void (*expand)(const std::byte* packed, std::size_t bytes, const std::byte* mask, std::size_t n,
                 std::byte* bits) noexcept;
  // Decodes a mask of n bits from its runs. Returns how many of the `available` bytes they take,
  // each of which is loaded once; 0 where they are not runs of n elements in all, or are as long as
  // the mask.
  std::size_t (*read_runs)(const std::byte* in, std::size_t available, std::size_t n,
                           std::byte* mask) noexcept;
};

inline constexpr std::size_t kSparseBlock = 32768;  // elements; codec/sparse.h says why so many

using HitMask = std::array<std::uint64_t, kSparseBlock / 64>;  // one bit per element

struct SparseKernels {
  // Finds the elements to send among up to kSparseBlock elements v = x + residual (may be null).
  // Bit i of hits says whether |v_i| is at least tau, or is NaN. error, which may be null or
  // residual, becomes v − copysign(tau, v) at the hits, with the sign of v where it is 0, and v
  // elsewhere. Returns the largest |v|, as its bits. Writes 32 bits of the mask at a time. tau > 0.
  std::uint32_t (*threshold)(const float* x, const float* residual, float tau, std::size_t n,
                             std::uint64_t* hits, float* error) noexcept;
  // Does the same, but writes v, to memory that may be null or residual, in place of error; tau >=
  // 0.
  std::uint32_t (*filter)(const float* x, const float* residual, float tau, std::size_t n,
                          std::uint64_t* hits, float* v) noexcept;
};

// Values in two bits (codec/two_bits.h), by the bits of float32.
struct TwoBits {
  static constexpr std::size_t kGroup = 512;           // values
  static constexpr std::uint32_t kLeastExponent = 27;  // of 2^-100, as floats store it

  static constexpr std::uint32_t exponent(std::uint32_t v) { return v >> 23 & 0xFFU; }
  // Returns |v| in units of 2^-21 of the power of two with the exponent `top`, rounded down.
  static constexpr std::uint32_t in_units(std::uint32_t v, std::uint32_t top) {
    const std::uint32_t own = exponent(v), fraction = v & 0x7FFFFFU;
    const std::uint32_t shift = 2 + top - (own == 0 ? 1 : own);
    if (shift > 24) return 0;
    return (own == 0 ? fraction : fraction | 0x800000U) >> shift;
  }
  // Returns the bits of such a unit.
  static constexpr std::uint32_t unit(std::uint32_t top) { return (top - 21) << 23; }
  static constexpr std::size_t groups(std::size_t n) { return (n + kGroup - 1) / kGroup; }
  static constexpr std::size_t level_bytes(std::size_t n) { return 4 * groups(n); }
  static constexpr std::size_t bytes(std::size_t n) { return level_bytes(n) + (n + 3) / 4; }
};

// lossless: a block's format is in codec/lossless.cc. Memory of any alignment.
struct LosslessKernels {
  static constexpr std::size_t kBlock = 128;  // elements
  static constexpr unsigned kPlain = 8;       // bits of an exponent that is written as it is

  struct OfWords {
    // Returns the bytes written for n elements; 0 where n is 0, or where `room` may not be enough.
    std::size_t (*pack)(const std::byte* x, std::size_t n, std::byte* out,
                        std::size_t room) noexcept;
    // Returns the bytes consumed; 0 where n is 0, or where `size` bytes are no payload of n
    // elements. Each byte that says how others are read is loaded once.
    std::size_t (*unpack)(const std::byte* in, std::size_t size, std::byte* y,
                          std::size_t n) noexcept;
  };
  OfWords two, four;  // by the bytes of an element
};

}  // namespace gradwire::codec
