// Random numbers that are a function of their place alone.
#pragma once

#include <cstdint>

namespace gradwire::codec {
namespace {  // one copy for each instruction set, as all of simd_lanes.h

constexpr std::uint64_t kMixedStep = 0x9E3779B97F4A7C15U;

// What SplitMix64 (Steele, Lea & Flood 2014) gives next in state z; all arithmetic wraps.
constexpr std::uint64_t mixed(std::uint64_t z) {
  z += kMixedStep;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
  return z ^ (z >> 31);
}

}  // namespace
}  // namespace gradwire::codec
