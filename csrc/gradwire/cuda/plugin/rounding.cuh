// How float32 becomes small integers: to nearest, or at random (codec/int8.cc).
#pragma once

#include "gradwire/codec/splitmix64.h"
#include "gradwire/cuda/plugin/gpu.cuh"

namespace gradwire::cuda {

using codec::splitmix64;

// The sum of this and a number of at most 2^22 has the nearest integer, ties to even, in its last
// bits.
inline constexpr float kRounder = 0x1.8p23F;

// Returns kRounder + q for element i of a block, whose scaled value is t; at random, t is limited
// to ±most.
class Rounding {
 public:
  __device__ Rounding(bool stochastic, float most, std::uint64_t key)
      : stochastic_(stochastic), most_(most), key_(key) {}

  __device__ bool stochastic() const { return stochastic_; }

  __device__ float operator()(float t, std::uint32_t i) const {
    if (!stochastic_) return t + kRounder;
    t = t > most_ ? most_ : (t < -most_ ? -most_ : t);
    const float nearest = (t + kRounder) - kRounder;
    const float floor = nearest > t ? nearest - 1.0F : nearest;
    return (uniform(i) < t - floor ? floor + 1.0F : floor) + kRounder;
  }

 private:
  // Returns element i's random number, in [0, 1) and of 23 bits.
  __device__ float uniform(std::uint32_t i) const {
    std::uint32_t h = i * 0x9E3779B9U + static_cast<std::uint32_t>(key_);
    h = (h ^ (h >> 16)) * 0x7FEB352DU;
    h = ((h ^ (h >> 15)) + static_cast<std::uint32_t>(key_ >> 32)) * 0x846CA68BU;
    h = h ^ (h >> 16);
    return __uint_as_float((h >> 9) | 0x3F800000U) - 1.0F;
  }

  bool stochastic_;
  float most_;
  std::uint64_t key_;
};

// Returns the part of the random numbers' key that all blocks of a span share.
__device__ inline std::uint64_t run_key(std::uint64_t seed, std::uint64_t call,
                                        std::uint64_t calls) {
  return splitmix64(splitmix64(seed) ^ call ^ calls);
}

}  // namespace gradwire::cuda
