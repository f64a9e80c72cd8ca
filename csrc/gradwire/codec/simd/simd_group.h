// 32 elements in registers, however many registers that takes.
#pragma once

#include <utility>

#include "gradwire/codec/simd/simd_sweep.h"

namespace gradwire::codec {
namespace {

template <typename T>
void put(std::byte* to, T value) {
  __builtin_memcpy(to, &value, sizeof value);
}
template <typename T>
T get(const std::byte* from) {
  T value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

constexpr std::size_t kGroup = 32;
constexpr std::size_t kParts = kGroup / kLanes;

template <typename V>
struct Parts {
  V part[kParts];

  V& operator[](std::size_t i) { return part[i]; }
  const V& operator[](std::size_t i) const { return part[i]; }
};
using Group = Parts<F32>;

// Calls body(k) for k from 0 on. Vectors take an expanded call per k, or else GCC keeps parts in
// memory; plain values may lie there.
template <typename Body, std::size_t... k>
[[gnu::always_inline]] inline void each_of([[maybe_unused]] Body body, std::index_sequence<k...>) {
  (body(k), ...);
}
template <std::size_t kCount, typename Body>
[[gnu::always_inline]] inline void each_of(Body body) {
  if constexpr (kLanes > 1)
    each_of(body, std::make_index_sequence<kCount>());
  else
    for (std::size_t k = 0; k < kCount; ++k) body(k);
}
template <typename Body>
[[gnu::always_inline]] inline void each_part(Body body) {
  each_of<kParts>(body);
}

// A Group as it lies in memory. It is loaded and stored part by part, for the same reason.
struct Groups {
  using V = Group;
  static constexpr std::size_t kCount = kGroup;
  static constexpr std::size_t kBytes = sizeof(float);

  static V load(const std::byte* p) {
    V v;
    each_part([&](std::size_t k) { v[k] = get<F32>(p + k * sizeof(F32)); });
    return v;
  }
  static void store(std::byte* p, const V& v) {
    each_part([&](std::size_t k) { put(p + k * sizeof(F32), v[k]); });
  }
};

// The values to encode: x, plus residual where there is one. Their NaNs may be of any kind.
template <bool kResidual>
struct GroupSource {
  const float* x;
  const float* residual;

  template <typename PartOf>
  Group operator()(std::size_t i, PartOf part) const {
    Group v = load<Groups>(x, i, part);
    if constexpr (kResidual) {
      const Group r = load<Groups>(residual, i, part);
      each_part([&](std::size_t k) { v[k] = v[k] + r[k]; });
    }
    return v;
  }

  // Prefetches the cache lines of a group, which may lie beyond the end: nothing is read.
  void ask_for(std::size_t i) const {
    for (const std::size_t line : {i, i + kGroup / 2}) {
      __builtin_prefetch(x + line);
      if constexpr (kResidual) __builtin_prefetch(residual + line);
    }
  }
};

// Returns the largest of all lanes.
std::int32_t largest_of(Parts<I32> lanes) {
  for (std::size_t half = kParts / 2; half > 0; half /= 2)
    for (std::size_t k = 0; k < half; ++k) lanes[k] = larger(lanes[k], lanes[k + half]);
  return largest(lanes[0]);
}

}  // namespace
}  // namespace gradwire::codec
