// The kernels, written once; simd_<isa>.cc includes this after simd_lanes.h and makes one table of
// it. The arithmetic is the contract between all tables: binary32 (binary64 for float64), round to
// nearest even, denormals kept, each operation rounded once, no FMA, no reassociation, and NaN
// results without sign or payload (x86 takes them from either operand, as the compiler ordered
// them).
#pragma once

#include <type_traits>

#include "gradwire/codec/simd.h"
#include "gradwire/codec/simd_lanes.h"

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

// A 16-bit float: computed with as float32.
template <typename Cast>
struct Narrow {
  using Value = float;
  using V = F32;
  static constexpr std::size_t kCount = kLanes;
  static constexpr std::size_t kBytes = sizeof(std::uint16_t);

  static V load(const std::byte* p) { return Cast::widen(Halves::load(p)); }
  static void store(std::byte* p, V v) { Halves::store(p, Cast::narrow(v)); }
};

struct Fp16 {
  static constexpr float kLargest = 65504.0F;
  static U16 narrow(F32 x) { return half_from_float(x); }
  static F32 widen(U16 h) { return float_from_half(h); }
};

struct Bf16 {
  static constexpr float kLargest = 0x1.FEp127F;
  static U16 narrow(F32 x) {
    const U32 u = bits<U32>(x);
    const U32 rounded = u + 0x7FFFU + ((u >> 16) & 1U);
    return codec::narrow((x == x ? rounded : u | 0x400000U) >> 16);
  }
  static F32 widen(U16 h) { return bits<F32>(codec::widen(h) << 16); }
};

// A kernel's body runs on all lanes, or on the first few: those are padded with zeros, so that
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

struct Sum {
  template <typename T>
  static Lanes<T> apply(Lanes<T> a, Lanes<T> b) {
    return canonical<T>(static_cast<Lanes<T>>(a + b));
  }
};

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

std::int32_t largest(I32 lanes) {
  std::int32_t found[kLanes];
  __builtin_memcpy(found, &lanes, sizeof lanes);
  std::int32_t most = found[0];
  for (std::int32_t each : found) most = each > most ? each : most;
  return most;
}

// Gathers, over a sweep, whether everything seen is finite.
class FiniteCheck {
 public:
  void see(F32 x) { seen_ = magnitude_of(x) > seen_ ? magnitude_of(x) : seen_; }
  bool holds() const { return largest(seen_) < kInfinity; }

 private:
  I32 seen_{};
};

bool finite(const float* x, std::size_t n) noexcept {
  FiniteCheck check;
  sweep<kLanes>(n, [&](std::size_t i, auto part) { check.see(load<Floats>(x, i, part)); });
  return check.holds();
}

// The error of one value; 0 where it is NaN or Inf, which no later call could make up for.
F32 lost(F32 v, F32 decoded) { return magnitude_of(v) < kInfinity ? v - decoded : F32{}; }

// What is encoded: x + residual, where there is one.
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

template <typename Cast, bool kResidual, bool kError>
void encode_from(Source<kResidual> source, float scale, std::byte* out, float* error,
                 std::size_t n) noexcept {
  const float unscale = 1.0F / scale;
  const auto limit = bits<std::int32_t>(Cast::kLargest * unscale);
  sweep<kLanes>(n, [=](std::size_t i, auto part) {
    const F32 v = source(i, part);
    const U16 h = Cast::narrow(saturate(v, limit) * scale);
    store<Halves>(out, i, part, h);
    if constexpr (kError) store<Floats>(error, i, part, lost(v, Cast::widen(h) * unscale));
  });
}

template <typename Cast>
void encode(const float* x, const float* residual, float scale, std::byte* out, float* error,
            std::size_t n) noexcept {
  if (residual != nullptr && error != nullptr)
    return encode_from<Cast, true, true>({x, residual}, scale, out, error, n);
  if (residual != nullptr)
    return encode_from<Cast, true, false>({x, residual}, scale, out, error, n);
  if (error != nullptr) return encode_from<Cast, false, true>({x, residual}, scale, out, error, n);
  encode_from<Cast, false, false>({x, residual}, scale, out, error, n);
}

template <typename Cast>
bool decode(const std::byte* in, float scale, float* y, std::size_t n) noexcept {
  const float unscale = 1.0F / scale;
  FiniteCheck check;
  sweep<kLanes>(n, [&](std::size_t i, auto part) {
    const F32 decoded = Cast::widen(load<Halves>(in, i, part)) * unscale;
    check.see(decoded);
    store<Floats>(y, i, part, decoded);
  });
  return check.holds();
}

template <typename Cast>
bool decode_add(const std::byte* in, float scale, float* y, std::size_t n) noexcept {
  const float unscale = 1.0F / scale;
  FiniteCheck check;
  sweep<kLanes>(n, [&](std::size_t i, auto part) {
    const F32 decoded = Cast::widen(load<Halves>(in, i, part)) * unscale;
    check.see(decoded);
    store<Floats>(y, i, part, Sum::apply<float>(load<Floats>(y, i, part), decoded));
  });
  return check.holds();
}

// Sums and products of signed integers wrap: they are those of the unsigned type.
template <typename L, typename Ordered = L>
constexpr std::array<ReduceKernel, kReduceOps> kReduceOf = {
    reduce<L, Sum>, reduce<L, Sum>, reduce<Ordered, Min>, reduce<Ordered, Max>, reduce<L, Prod>};

template <typename Cast>
constexpr CastKernels kCastOf = {encode<Cast>, decode<Cast>, decode_add<Cast>};

constexpr Kernels table(const char* name) {
  return {name,
          {{kReduceOf<Packed<float>>, kReduceOf<Packed<double>>,     //
            kReduceOf<Narrow<Fp16>>, kReduceOf<Narrow<Bf16>>,        //
            kReduceOf<Packed<std::uint8_t>, Packed<std::int8_t>>,    //
            kReduceOf<Packed<std::uint32_t>, Packed<std::int32_t>>,  //
            kReduceOf<Packed<std::uint64_t>, Packed<std::int64_t>>,  //
            kReduceOf<Packed<std::uint8_t>>}},
          {{scale<Packed<float>>, scale<Packed<double>>, scale<Narrow<Fp16>>, scale<Narrow<Bf16>>,
            nullptr, nullptr, nullptr, nullptr}},
          finite,
          kCastOf<Fp16>,
          kCastOf<Bf16>};
}

}  // namespace
}  // namespace gradwire::codec
