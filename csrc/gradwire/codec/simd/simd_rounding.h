// How float32 becomes small integers: to nearest, or at random.
#pragma once

#include "gradwire/codec/simd/simd_random.h"

namespace gradwire::codec {
namespace {

// Added to a value of at most 2^22, this leaves the nearest integer, ties to even, in the last
// bits.
constexpr float kRounder = 0x1.8p23F;

// A rounding returns kRounder + q for t, the scaled elements from `i` on.
struct ToNearest {
  explicit ToNearest(const RandomPosition*) {}
  void start_block(std::size_t) {}
  F32 operator()(F32 t, std::size_t) const { return t + kRounder; }
};

// Limits t to ±kMost.
template <int kMost>
class AtRandom {
 public:
  explicit AtRandom(const RandomPosition* position)
      : random_(*position), first_(position->element) {}
  void start_block(std::size_t begin) { random_.start_block(first_ + begin); }

  F32 operator()(F32 t, std::size_t i) const {
    constexpr auto kLimit = static_cast<float>(kMost);
    t = t > kLimit ? (F32{} + kLimit) : (t < -kLimit ? (F32{} - kLimit) : t);
    const F32 nearest = (t + kRounder) - kRounder;
    const F32 floor = nearest > t ? nearest - 1.0F : nearest;
    return (uniform(i) < t - floor ? floor + 1.0F : floor) + kRounder;
  }

 private:
  // Returns random numbers of 23 bits in [0, 1).
  F32 uniform(std::size_t i) const { return bits<F32>((random_(i) >> 9) | 0x3F800000U) - 1.0F; }

  RandomBits random_;
  std::uint64_t first_;
};

}  // namespace
}  // namespace gradwire::codec
