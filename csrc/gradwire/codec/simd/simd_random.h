// Random numbers for the elements of a run, each of which depends on the element's place alone.
#pragma once

#include "gradwire/codec/blocks.h"
#include "gradwire/codec/simd/simd_lanes.h"
#include "gradwire/codec/splitmix64.h"

namespace gradwire::codec {
namespace {

// 32-bit random numbers for the elements of a block:
//   splitmix64() is SplitMix64's output function of 64 bits; all arithmetic wraps.
//   key := splitmix64(splitmix64(splitmix64(seed) ^ call) ^ index of the block's first element)
//   h := i · 0x9E3779B9 + low(key), where i counts in the block; h := (h ^ h >> 16) · 0x7FEB352D;
//   h := ((h ^ h >> 15) + high(key)) · 0x846CA68B; h ^ h >> 16 is the number.
class RandomBits {
 public:
  explicit RandomBits(const RandomPosition& position)
      : run_(splitmix64(splitmix64(position.seed) ^ position.call)) {
    std::uint32_t number[kLanes];
    for (std::size_t i = 0; i < kLanes; ++i) number[i] = static_cast<std::uint32_t>(i);
    __builtin_memcpy(&lane_, number, sizeof lane_);
  }
  void start_block(std::uint64_t first) { key_ = splitmix64(run_ ^ first); }

  // Returns the random numbers of the elements from `i` on.
  U32 operator()(std::size_t i) const {
    U32 h =
        (lane_ + static_cast<std::uint32_t>(i)) * 0x9E3779B9U + static_cast<std::uint32_t>(key_);
    h = (h ^ (h >> 16)) * 0x7FEB352DU;
    h = ((h ^ (h >> 15)) + static_cast<std::uint32_t>(key_ >> 32)) * 0x846CA68BU;
    return h ^ (h >> 16);
  }

 private:
  std::uint64_t run_, key_ = 0;
  U32 lane_;
};

}  // namespace
}  // namespace gradwire::codec
