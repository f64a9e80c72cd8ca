// Folding one array into another, and scaling one.
#pragma once

#include <array>

#include "gradwire/codec/simd/simd.h"
#include "gradwire/codec/simd/simd_cast.h"
#include "gradwire/codec/simd/simd_sweep.h"

namespace gradwire::codec {
namespace {

// Narrow plain values are widened to int, which has no room for the product of two uint16.
struct Prod {
  template <typename T>
  static Lanes<T> apply(Lanes<T> a, Lanes<T> b) {
    if constexpr (sizeof(Lanes<T>) < sizeof(unsigned))
      return static_cast<T>(1U * a * b);
    else
      return canonical<T>(static_cast<Lanes<T>>(a * b));
  }
};

// Equal floats differ at most in the sign of a zero: `|` keeps the minus, `&` drops it.
template <bool kMax>
struct Extreme {
  template <typename T>
  static Lanes<T> apply(Lanes<T> a, Lanes<T> b) {
    const auto above = kMax ? a > b : a < b;
    if constexpr (std::is_floating_point_v<T>) {
      const auto one = bits<BitLanes<T>>(a), other = bits<BitLanes<T>>(b);
      const auto same = bits<Lanes<T>>(kMax ? one & other : one | other);
      const auto below = kMax ? b > a : b < a;
      return above ? a : (below ? b : (a == b ? same : nan<T>()));
    } else {
      return above ? a : b;
    }
  }
};
using Min = Extreme<false>;
using Max = Extreme<true>;

struct And {
  template <typename T>
  static Lanes<T> apply(Lanes<T> a, Lanes<T> b) {
    return static_cast<Lanes<T>>(a & b);
  }
};

struct Or {
  template <typename T>
  static Lanes<T> apply(Lanes<T> a, Lanes<T> b) {
    return static_cast<Lanes<T>>(a | b);
  }
};

struct Xor {
  template <typename T>
  static Lanes<T> apply(Lanes<T> a, Lanes<T> b) {
    return static_cast<Lanes<T>>(a ^ b);
  }
};

// Operates on truth values: anything but 0 is true. The result is 0 or 1.
template <typename Bitwise>
struct Logical {
  template <typename T>
  static Lanes<T> truth(Lanes<T> a) {
    const Lanes<T> yes = static_cast<Lanes<T>>(Lanes<T>{} + T{1});
    return a != 0 ? yes : Lanes<T>{};
  }
  template <typename T>
  static Lanes<T> apply(Lanes<T> a, Lanes<T> b) {
    return Bitwise::template apply<T>(truth<T>(a), truth<T>(b));
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

// Reduces elements that consist of kEach values of L each.
template <typename L, typename Op, std::size_t kEach>
void reduce_each(void* acc, const void* x, std::size_t n) noexcept {
  reduce<L, Op>(acc, x, kEach * n);
}

// L is a 16-bit float whose arithmetic is done in float32.
template <typename L, typename Op>
void begin_wide(const void* a, const void* b, float* acc, std::size_t n) noexcept {
  sweep<L::kCount>(n, [=](std::size_t i, auto part) {
    store<Floats>(acc, i, part,
                  Op::template apply<float>(load<L>(a, i, part), load<L>(b, i, part)));
  });
}

template <typename L, typename Op>
void fold_wide(float* acc, const void* x, std::size_t n) noexcept {
  sweep<L::kCount>(n, [=](std::size_t i, auto part) {
    const F32 sum = Op::template apply<float>(load<Floats>(acc, i, part), load<L>(x, i, part));
    store<Floats>(acc, i, part, sum);
  });
}

template <typename L>
void round_wide(const float* acc, float factor, void* y, std::size_t n) noexcept {
  sweep<L::kCount>(n, [=](std::size_t i, auto part) {
    store<L>(y, i, part, canonical<float>(load<Floats>(acc, i, part) * factor));
  });
}

template <typename L, typename Op>
constexpr WideKernels kWideOf = {begin_wide<L, Op>, fold_wide<L, Op>, round_wide<L>};

template <typename L>
void scale(void* x, double factor, std::size_t n) noexcept {
  using T = typename L::Value;
  const T by = static_cast<T>(factor);
  sweep<L::kCount>(n, [=](std::size_t i, auto part) {
    store<L>(x, i, part, canonical<T>(load<L>(x, i, part) * by));
  });
}

template <typename L>
void scale_pairs(void* x, double factor, std::size_t n) noexcept {
  scale<L>(x, factor, 2 * n);
}

using OfEachOp = std::array<ReduceKernel, kReduceOps>;

template <typename L>
constexpr OfEachOp kReduceFloats = {reduce<L, Sum>, reduce<L, Sum>, reduce<L, Min>, reduce<L, Max>,
                                    reduce<L, Prod>};

template <typename L>
constexpr OfEachOp kReducePairs = {reduce_each<L, Sum, 2>, reduce_each<L, Sum, 2>};

// Sums and products of signed integers wrap: they are those of the unsigned type.
template <typename T, typename Ordered = T, typename L = Packed<T>,
          typename Bytes = Packed<std::uint8_t>>
constexpr OfEachOp kReduceIntegers = {reduce<L, Sum>,
                                      nullptr,
                                      reduce<Packed<Ordered>, Min>,
                                      reduce<Packed<Ordered>, Max>,
                                      reduce<L, Prod>,
                                      reduce_each<Bytes, And, sizeof(T)>,
                                      reduce_each<Bytes, Or, sizeof(T)>,
                                      reduce_each<Bytes, Xor, sizeof(T)>,
                                      reduce<L, Logical<And>>,
                                      reduce<L, Logical<Or>>,
                                      reduce<L, Logical<Xor>>};

// A sum of bools is true where one of them is, as NumPy and torch have it.
constexpr ReduceKernel kAllTrue = reduce<Packed<std::uint8_t>, Logical<And>>;
constexpr ReduceKernel kAnyTrue = reduce<Packed<std::uint8_t>, Logical<Or>>;
constexpr ReduceKernel kOddTrue = reduce<Packed<std::uint8_t>, Logical<Xor>>;
constexpr OfEachOp kReduceBool = {kAnyTrue, nullptr,  kAllTrue, kAnyTrue, kAllTrue, kAllTrue,
                                  kAnyTrue, kOddTrue, kAllTrue, kAnyTrue, kOddTrue};

}  // namespace
}  // namespace gradwire::codec
