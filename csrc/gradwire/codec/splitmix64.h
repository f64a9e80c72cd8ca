// SplitMix64: random numbers that depend only on a counter, so any of them can be computed alone.
#pragma once

#include <cstdint>

namespace gradwire::codec {
namespace {  // one copy for each instruction set, as all of simd_lanes.h

constexpr std::uint64_t kSplitMix64Step = 0x9E3779B97F4A7C15U;

// Returns the next output of SplitMix64 (Steele, Lea & Flood 2014) in state z. All arithmetic
// wraps.
constexpr std::uint64_t splitmix64(std::uint64_t z) {
  z += kSplitMix64Step;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
  return z ^ (z >> 31);
}

}  // namespace
}  // namespace gradwire::codec
