// Folding one array into another, and scaling one.
#pragma once

#include <array>

#include "gradwire/codec/simd.h"
#include "gradwire/codec/simd_sweep.h"

namespace gradwire::codec {
namespace {

struct Prod {
  template <typename T>
  static Lanes<T> apply(Lanes<T> a, Lanes<T> b) {
    return canonical<T>(static_cast<Lanes<T>>(a * b));
  }
};

// Equal floats differ at most in the sign of a zero: `|` keeps the minus, `&` drops it.
struct Min {
  template <typename T>
  static Lanes<T> apply(Lanes<T> a, Lanes<T> b) {
    if constexpr (std::is_floating_point_v<T>) {
      const auto same = bits<Lanes<T>>(bits<BitLanes<T>>(a) | bits<BitLanes<T>>(b));
      return a < b ? a : (b < a ? b : (a == b ? same : nan<T>()));
    } else {
      return a < b ? a : b;
    }
  }
};

struct Max {
  template <typename T>
  static Lanes<T> apply(Lanes<T> a, Lanes<T> b) {
    if constexpr (std::is_floating_point_v<T>) {
      const auto same = bits<Lanes<T>>(bits<BitLanes<T>>(a) & bits<BitLanes<T>>(b));
      return a > b ? a : (b > a ? b : (a == b ? same : nan<T>()));
    } else {
      return a > b ? a : b;
    }
  }
};

template <typename L, typename Op>
void reduce(void* acc, const void* x, std::size_t n) noexcept {
  sweep<L::kCount>(n, [=](std::size_t i, auto part) {
    const auto sum = Op::template apply<typename L::Value>(load<L>(acc, i, part),  //
                                                           load<L>(x, i, part));
    store<L>(acc, i, part, sum);
  });
}

template <typename L>
void scale(void* x, double factor, std::size_t n) noexcept {
  using T = typename L::Value;
  const T by = static_cast<T>(factor);
  sweep<L::kCount>(n, [=](std::size_t i, auto part) {
    store<L>(x, i, part, canonical<T>(load<L>(x, i, part) * by));
  });
}

// Sums and products of signed integers wrap: they are those of the unsigned type.
template <typename L, typename Ordered = L>
constexpr std::array<ReduceKernel, kReduceOps> kReduceOf = {
    reduce<L, Sum>, reduce<L, Sum>, reduce<Ordered, Min>, reduce<Ordered, Max>, reduce<L, Prod>};

}  // namespace
}  // namespace gradwire::codec
