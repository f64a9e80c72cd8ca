// Where the payloads lie that are added to a unit of elements: count() of them, payload j at(j).
#pragma once

#include "gradwire/cuda/plugin/gpu.cuh"

namespace gradwire::cuda {

struct NoPayloads {
  static constexpr bool kAny = false;
  __device__ static int count() { return 0; }
  __device__ static const std::byte* at(int) { return nullptr; }
};
// A unit's payloads in messages of one layout.
struct StridedPayloads {
  static constexpr bool kAny = true;
  const GpuPayloads& messages;
  std::uint64_t place;  // where the unit's begins in a message
  __device__ int count() const { return messages.count; }
  __device__ const std::byte* at(int j) const {
    return messages.first + (place + messages.offset(j));
  }
};
}  // namespace gradwire::cuda
