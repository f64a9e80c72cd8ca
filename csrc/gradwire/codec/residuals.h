// A residual as it is kept: float32, or bfloat16 in half the memory.
//
// bfloat16 has 8 significant bits. Rounded to nearest, a residual would never grow by what is less
// than 2^-9 of it, call after call: sparse codecs let elements wait, and these would wait for ever.
// So it is rounded at random, by less than 2^-7 of it and with the mean e: in expectation nothing
// is lost. What the random numbers depend on is the same in every run (codec/simd/simd_random.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "gradwire/codec/codec.h"

namespace gradwire::codec {

enum class ResidualType : std::uint8_t { kFloat32, kBFloat16 };

// The residual of one key. Rounding outside of a call draws its own numbers: `draw` says which.
class Residual {
 public:
  explicit Residual(ResidualType type) noexcept : type_(type) {}

  std::size_t size() const noexcept { return wide_.size() + narrow_.size(); }
  bool empty() const noexcept { return size() == 0; }
  void resize(std::size_t n);
  void swap(Residual& other) noexcept;

  std::vector<float> values() const&;
  std::vector<float> values() &&;
  void assign(std::vector<float> values, std::uint64_t draw);
  // A stretch of them.
  void read(std::size_t first, std::span<float> values) const noexcept;
  void write(std::size_t first, std::span<const float> values, std::uint64_t draw) noexcept;

  // Set e, or e', of a context that has none.
  void read_by(EncodeContext& context) const noexcept;
  void write_by(EncodeContext& context) noexcept;

 private:
  ResidualType type_;
  std::vector<float> wide_;  // one of the two is in use
  std::vector<std::uint16_t> narrow_;
};

// Codec::encode() for residuals of either type, a few units at a time where they are narrow: so
// they are wide in the cache alone.
std::size_t encode(const Codec& codec, const float* x, std::size_t n, const EncodeContext& context,
                   Bytes out);
// What is never encoded delivers its whole residual: x := x + e, and e' := 0.
void deliver(const EncodeContext& context, float* x, std::size_t n);
// The first half of that.
void add_residual(const EncodeContext& context, float* x, std::size_t n);
// e' := error.
void keep(const EncodeContext& context, const float* error, std::size_t n);

}  // namespace gradwire::codec
