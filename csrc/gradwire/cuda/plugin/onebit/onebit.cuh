// Definitions that onebit's encoder and decoder share.
#pragma once

#include "gradwire/codec/blocks.h"
#include "gradwire/cuda/plugin/gpu.cuh"

namespace gradwire::cuda::onebit {

using codec::OneBitKernels;

inline constexpr unsigned kCount = 32;                                       // elements of a thread
inline constexpr unsigned kStripe = kWarp * kCount;                          // elements of a warp
inline constexpr unsigned kMostWarps = OneBitKernels::kMostBlock / kStripe;  // of a team
// Where each warp works on blocks of its own: the warps of a thread block, and the thread blocks of
// a multiprocessor, which leaves a thread 96 registers.
inline constexpr unsigned kAloneWarps = 4;
inline constexpr unsigned kAloneBlocks = 5;
inline constexpr std::uint32_t kHeader = 2 * sizeof(float);

inline std::uint64_t slot_bytes(std::uint64_t block) {
  return aligned(OneBitKernels::most_bytes(block));
}

// Returns the bytes of the table of sizes in front of a span's slots.
constexpr std::uint64_t table_bytes(std::uint64_t blocks) {
  return aligned(sizeof(std::uint32_t) * blocks);
}

}  // namespace gradwire::cuda::onebit
