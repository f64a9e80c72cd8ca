// A residual as it is stored: float32, or bfloat16 in half the memory.
//
// bfloat16 has 8 significant bits. With rounding to nearest, adding less than 2^-9 of a residual
// would never change it, call after call: sparse codecs let elements wait, and these would wait for
// ever. So a residual is rounded at random, by less than 2^-7 of it and with the mean e: in
// expectation nothing is lost. The random numbers are the same in every run
// (codec/simd/simd_random.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "gradwire/codec/codec.h"

namespace gradwire::codec {

enum class ResidualType : std::uint8_t { kFloat32, kBFloat16 };

// The residual of one key. `draw` numbers the random roundings outside of calls.
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
  // Read and write the elements from `first` on.
  void read(std::size_t first, std::span<float> values) const noexcept;
  void write(std::size_t first, std::span<const float> values, std::uint64_t draw) noexcept;

  // Set a context's e, or its e', to this residual.
  void read_by(EncodeContext& context) const noexcept;
  void write_by(EncodeContext& context) noexcept;

 private:
  ResidualType type_;
  std::vector<float> wide_;  // one of the two is in use
  std::vector<std::uint16_t> narrow_;
};

// Calls codec.encode() for residuals of either type. Widens narrow ones a few blocks at a time, so
// that the wide values stay in the cache.
std::size_t encode(const Codec& codec, const float* x, std::size_t n, const EncodeContext& context,
                   Bytes out);
// x := x + e, and e' := 0, for values that are not encoded.
void deliver(const EncodeContext& context, float* x, std::size_t n);
// x := x + e. Leaves e' as it is.
void add_residual(const EncodeContext& context, float* x, std::size_t n);
// e' := error, rounded at random where e' is narrow.
void keep(const EncodeContext& context, const float* error, std::size_t n);

}  // namespace gradwire::codec
