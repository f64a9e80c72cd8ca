// The parts of every kernel: lanes in memory, loops over them, sums, checks of finiteness.
#pragma once

#include <type_traits>
#include <utility>

#include "gradwire/codec/simd/simd_lanes.h"

namespace gradwire::codec {
namespace {

// How lanes of a kind lie in memory (kBytes an element) and what they are in registers (V).
template <typename T, std::size_t N = kLanesOf<T>>
struct Packed {
  using Value = T;
  using V = Vector<T, N>;
  static constexpr std::size_t kCount = N;
  static constexpr std::size_t kBytes = sizeof(T);

  static V load(const std::byte* p) {
    V v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
  }
  static void store(std::byte* p, V v) { __builtin_memcpy(p, &v, sizeof v); }
};
using Floats = Packed<float>;
using Halves = Packed<std::uint16_t, kLanes>;

// A kernel's body runs on all lanes, or on the first few with the others padded by zeros, so that
// every element sees the same instructions.
struct All {};

template <typename L>
typename L::V load(const void* base, std::size_t i, All) {
  return L::load(static_cast<const std::byte*>(base) + i * L::kBytes);
}
template <typename L>
typename L::V load(const void* base, std::size_t i, std::size_t count) {
  std::byte padded[L::kCount * L::kBytes] = {};
  __builtin_memcpy(padded, static_cast<const std::byte*>(base) + i * L::kBytes, count * L::kBytes);
  return L::load(padded);
}
template <typename L>
void store(void* base, std::size_t i, All, typename L::V v) {
  L::store(static_cast<std::byte*>(base) + i * L::kBytes, v);
}
template <typename L>
void store(void* base, std::size_t i, std::size_t count, typename L::V v) {
  std::byte padded[L::kCount * L::kBytes];
  L::store(padded, v);
  __builtin_memcpy(static_cast<std::byte*>(base) + i * L::kBytes, padded, count * L::kBytes);
}

template <std::size_t kCount, typename Body>
void sweep(std::size_t n, Body body) {
  std::size_t i = 0;
  for (; i + kCount <= n; i += kCount) body(i, All{});
  if constexpr (kCount > 1)
    if (i < n) body(i, n - i);
}

// Calls body(Flag<has residual>, Flag<has error>), so that a kernel is compiled for each case.
template <bool kValue>
struct Flag {
  static constexpr bool value = kValue;
};
template <typename Body>
auto by_presence(const float* residual, const float* error, Body body) {
  if (residual != nullptr && error != nullptr) return body(Flag<true>(), Flag<true>());
  if (residual != nullptr) return body(Flag<true>(), Flag<false>());
  if (error != nullptr) return body(Flag<false>(), Flag<true>());
  return body(Flag<false>(), Flag<false>());
}

template <typename T>
using BitsOf = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;
template <typename T>
using BitLanes = Vector<BitsOf<T>, kLanesOf<T>>;
template <typename T>
using Lanes = Vector<T, kLanesOf<T>>;

template <typename T>
Lanes<T> nan() {
  constexpr auto kQuiet = __builtin_bit_cast(BitsOf<T>, static_cast<T>(__builtin_nan("")));
  return bits<Lanes<T>>(BitLanes<T>{} | kQuiet);
}

template <typename T>
Lanes<T> canonical(Lanes<T> v) {
  if constexpr (std::is_floating_point_v<T>) return v == v ? v : nan<T>();
  return v;
}

void make_canonical(float* y, std::size_t n) {
  sweep<kLanes>(n, [=](std::size_t i, auto part) {
    store<Floats>(y, i, part, canonical<float>(load<Floats>(y, i, part)));
  });
}

void fill_nan(float* y, std::size_t n) {
  sweep<kLanes>(n, [=](std::size_t i, auto part) { store<Floats>(y, i, part, nan<float>()); });
}

struct Sum {
  template <typename T>
  static Lanes<T> apply(Lanes<T> a, Lanes<T> b) {
    return canonical<T>(static_cast<Lanes<T>>(a + b));
  }
};

template <std::size_t kWidth, typename V, std::size_t... lane>
V turned(V x, std::index_sequence<lane...>) {
  return __builtin_shufflevector(x, x, ((lane + kWidth) % kLanes)...);
}

// Adds lane l + kWidth to lane l, where there are so many lanes.
template <std::size_t kWidth, typename V>
V fold(V x) {
  if constexpr (kLanes > kWidth) return x + turned<kWidth>(x, std::make_index_sequence<kLanes>());
  return x;
}

template <typename T>
T first_lane(Vector<T, kLanes> lanes) {
  T first;
  __builtin_memcpy(&first, &lanes, sizeof first);
  return first;
}

// Without its sign a float32 compares as an integer; AVX2 compares only signed ones.
I32 magnitude_of(F32 x) { return bits<I32>(x) & 0x7FFFFFFF; }
constexpr std::int32_t kInfinity = 0x7F800000;

// Limits finite values to +-limit, which is given as its bits.
F32 saturate(F32 x, std::int32_t limit) {
  const I32 magnitude = magnitude_of(x);
  const I32 sign = bits<I32>(x) ^ magnitude;
  const I32 limited = magnitude > limit ? (I32{} | limit) : magnitude;
  return bits<F32>((magnitude < kInfinity ? limited : magnitude) | sign);
}

template <std::size_t kWidth>
I32 larger_turned(I32 x) {
  if constexpr (kLanes > kWidth)
    return larger(x, turned<kWidth>(x, std::make_index_sequence<kLanes>()));
  return x;
}

std::int32_t largest(I32 lanes) {
  const I32 most = larger_turned<1>(larger_turned<2>(larger_turned<4>(larger_turned<8>(lanes))));
  std::int32_t first;
  __builtin_memcpy(&first, &most, sizeof first);
  return first;
}

// Notes, over a sweep, whether all values seen are finite.
class FiniteCheck {
 public:
  void see(F32 x) { seen_ = larger(magnitude_of(x), seen_); }
  bool holds() const { return largest(seen_) < kInfinity; }

 private:
  I32 seen_{};
};

bool finite(const float* x, std::size_t n) noexcept {
  FiniteCheck check;
  sweep<kLanes>(n, [&](std::size_t i, auto part) { check.see(load<Floats>(x, i, part)); });
  return check.holds();
}

// Returns the error of one value; 0 where it is NaN or Inf, which no later call could make up for.
F32 lost(F32 v, F32 decoded) { return magnitude_of(v) < kInfinity ? v - decoded : F32{}; }

// The values to encode: x, plus residual where there is one.
template <bool kResidual>
struct Source {
  const float* x;
  const float* residual;

  template <typename PartOf>
  F32 operator()(std::size_t i, PartOf part) const {
    F32 v = load<Floats>(x, i, part);
    if constexpr (kResidual) v = Sum::apply<float>(v, load<Floats>(residual, i, part));
    return v;
  }
};

}  // namespace
}  // namespace gradwire::codec
