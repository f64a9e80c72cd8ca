// Where the payloads lie that are added to a unit of elements: count() of them, payload j at(j).
#pragma once

#include "gradwire/cuda/plugin/gpu.cuh"

namespace gradwire::cuda {

struct NoPayloads {
  static constexpr bool kAny = false;
  __device__ static int count() { return 0; }
  __device__ static const std::byte* at(int) { return nullptr; }
};
struct OnePayload {
  static constexpr bool kAny = true;
  const std::byte* payload;
  __device__ static int count() { return 1; }
  __device__ const std::byte* at(int) const { return payload; }
};
// A unit's payloads in messages of one layout.
struct StridedPayloads {
  static constexpr bool kAny = true;
  const std::byte* first;
  std::uint64_t stride;
  int messages;
  __device__ int count() const { return messages; }
  __device__ const std::byte* at(int j) const {
    return first + static_cast<std::uint64_t>(j) * stride;
  }
};
// What lies so many bytes behind the beginning of each payload.
template <typename Payloads>
struct Shifted {
  static constexpr bool kAny = Payloads::kAny;
  const Payloads& payloads;
  std::uint64_t bytes;
  __device__ int count() const { return payloads.count(); }
  __device__ const std::byte* at(int j) const { return payloads.at(j) + bytes; }
};

}  // namespace gradwire::cuda
