// What folds elements: their types, operations, and the kernel that each pair of them has
// (codec/simd/simd_reduce.h).
#pragma once

#include <type_traits>

#include "gradwire/base/types.h"
#include "gradwire/cuda/plugin/cast/cast.cuh"

namespace gradwire::cuda {

// The type that an element is stored as, and the type that it is computed as. All results that are
// NaN have the same bits.
template <typename T>
struct Plain {
  using Stored = T;
  using Value = T;
  __device__ static T widen(T v) { return v; }
  __device__ static T narrow(T v) { return canonical(v); }
};
template <typename Half>
struct Narrow {
  using Stored = std::uint16_t;
  using Value = float;
  __device__ static float widen(std::uint16_t h) { return Half::widen_number(h); }
  __device__ static std::uint16_t narrow(float v) {
    return v == v ? Half::narrow_number(v) : Half::kNan;
  }
};

struct Bool {
  using Stored = std::uint8_t;
  using Value = bool;
  __device__ static bool widen(std::uint8_t v) { return v != 0; }
  __device__ static std::uint8_t narrow(bool v) { return v ? 1 : 0; }
};

// Integers are computed as unsigned types that are not narrower than int, so that they wrap.
template <typename T, bool kInteger = std::is_integral_v<T>>
struct Wrapping {
  using type = T;
};
template <typename T>
struct Wrapping<T, true> {
  using type = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;
};

struct Sum {
  template <typename T>
  __device__ static T apply(T a, T b) {
    using U = typename Wrapping<T>::type;
    return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
  }
};

struct Prod {
  template <typename T>
  __device__ static T apply(T a, T b) {
    using U = typename Wrapping<T>::type;
    return static_cast<T>(static_cast<U>(a) * static_cast<U>(b));
  }
};

struct And {
  template <typename T>
  __device__ static T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};

struct Or {
  template <typename T>
  __device__ static T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};

struct Xor {
  template <typename T>
  __device__ static T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

// Operates on truth values: anything but 0 is true. The result is 0 or 1.
template <typename Bitwise>
struct Logical {
  template <typename T>
  __device__ static T apply(T a, T b) {
    return static_cast<T>(Bitwise::apply(a != 0, b != 0));
  }
};

// Joins two equal floats. They differ at most in the sign of a zero, which min keeps and max drops.
__device__ inline float same(float a, float b, bool keeps) {
  const std::uint32_t x = __float_as_uint(a), y = __float_as_uint(b);
  return __uint_as_float(keeps ? x | y : x & y);
}
__device__ inline double same(double a, double b, bool keeps) {
  const long long x = __double_as_longlong(a), y = __double_as_longlong(b);
  return __longlong_as_double(keeps ? x | y : x & y);
}

template <typename T, bool kMin>
__device__ T extreme(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (a == b) return same(a, b, kMin);
    const bool takes_a = kMin ? a < b : a > b, takes_b = kMin ? b < a : b > a;
    return takes_a ? a : takes_b ? b : quiet_nan<T>();
  } else {
    return (kMin ? a < b : a > b) ? a : b;
  }
}

struct Min {
  template <typename T>
  __device__ static T apply(T a, T b) {
    return extreme<T, true>(a, b);
  }
};

struct Max {
  template <typename T>
  __device__ static T apply(T a, T b) {
    return extreme<T, false>(a, b);
  }
};

// acc := acc (op) x. acc stays in registers, in the computing type, so that a result is rounded
// only once, when it is stored.
template <typename Kind, typename Op, unsigned kCount>
__device__ void fold_into(typename Kind::Value (&acc)[kCount],
                          const typename Kind::Stored (&x)[kCount]) {
#pragma unroll
  for (unsigned i = 0; i < kCount; ++i) acc[i] = Op::apply(acc[i], Kind::widen(x[i]));
}

template <typename Kind, unsigned kCount>
__device__ void fold_bits(ReduceOp op, typename Kind::Value (&acc)[kCount],
                          const typename Kind::Stored (&x)[kCount]) {
  switch (op) {
    case ReduceOp::kBand:
      return fold_into<Kind, And>(acc, x);
    case ReduceOp::kBor:
      return fold_into<Kind, Or>(acc, x);
    case ReduceOp::kBxor:
      return fold_into<Kind, Xor>(acc, x);
    case ReduceOp::kLand:
      return fold_into<Kind, Logical<And>>(acc, x);
    case ReduceOp::kLor:
      return fold_into<Kind, Logical<Or>>(acc, x);
    default:
      return fold_into<Kind, Logical<Xor>>(acc, x);
  }
}

// Sums of floats have a kernel of their own, kSums; all other kernels look up their op for each
// tile.
template <bool kSums, typename Kind, unsigned kCount>
__device__ void fold_by(ReduceOp op, typename Kind::Value (&acc)[kCount],
                        const typename Kind::Stored (&x)[kCount]) {
  constexpr bool kBits = std::is_integral_v<typename Kind::Value>;
  if constexpr (std::is_same_v<Kind, Bool>)
    fold_bits<Kind>(op, acc, x);
  else if (kSums || op == ReduceOp::kSum || op == ReduceOp::kAvg)
    fold_into<Kind, Sum>(acc, x);
  else if (op == ReduceOp::kMin)
    fold_into<Kind, Min>(acc, x);
  else if (op == ReduceOp::kMax)
    fold_into<Kind, Max>(acc, x);
  else if (!kBits || op == ReduceOp::kProd)
    fold_into<Kind, Prod>(acc, x);
  else if constexpr (kBits)
    fold_bits<Kind>(op, acc, x);
}

template <typename Kind, unsigned kCount>
__device__ void widen_all(const typename Kind::Stored (&x)[kCount],
                          typename Kind::Value (&acc)[kCount]) {
#pragma unroll
  for (unsigned i = 0; i < kCount; ++i) acc[i] = Kind::widen(x[i]);
}

template <typename Kind, unsigned kCount>
__device__ void narrow_all(const typename Kind::Value (&acc)[kCount],
                           typename Kind::Stored (&x)[kCount]) {
#pragma unroll
  for (unsigned i = 0; i < kCount; ++i) x[i] = Kind::narrow(acc[i]);
}

// Multiplies sums of floats; others are never scaled (Folding).
template <typename Value, unsigned kCount>
__device__ void scale_by(double by, Value (&acc)[kCount]) {
  if constexpr (std::is_floating_point_v<Value>) {
    const auto factor = static_cast<Value>(by);
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) acc[i] = acc[i] * factor;
  }
}

// What decides which kernel folds.
struct Folding {
  DType dtype;
  ReduceOp op;
  bool scales;
};

// Calls start<Kind, kSums>(op, elements of Kind in one of dtype).
template <typename Kind, typename Start>
Status start_floats(const Folding& of, Start start, unsigned each = 1) {
  if (of.op > ReduceOp::kProd) return cudaErrorInvalidValue;
  const bool sums = of.op == ReduceOp::kSum || of.op == ReduceOp::kAvg;
  return sums ? start.template operator()<Kind, true>(of.op, each)
              : start.template operator()<Kind, false>(of.op, each);
}

template <typename T, typename Start>
Status start_integers(const Folding& of, Start start) {
  if (of.op == ReduceOp::kAvg || of.scales) return cudaErrorInvalidValue;
  return start.template operator()<Plain<T>, false>(of.op, 1);
}

template <typename T, typename Start>
Status start_pairs(const Folding& of, Start start) {
  if (of.op > ReduceOp::kAvg) return cudaErrorInvalidValue;
  return start_floats<Plain<T>>(of, start, 2);
}

// A sum of bools is true where one of them is (codec/simd/simd_reduce.h).
template <typename Start>
Status start_bools(const Folding& of, Start start) {
  if (of.op == ReduceOp::kAvg || of.scales) return cudaErrorInvalidValue;
  ReduceOp op = of.op;
  if (op == ReduceOp::kSum || op == ReduceOp::kMax || op == ReduceOp::kBor)
    op = ReduceOp::kLor;
  else if (op == ReduceOp::kProd || op == ReduceOp::kMin || op == ReduceOp::kBand)
    op = ReduceOp::kLand;
  return start.template operator()<Bool, false>(op, 1);
}

template <typename Start>
Status start_any(const Folding& of, Start start) {
  switch (of.dtype) {
    case DType::kFloat32:
      return start_floats<Plain<float>>(of, start);
    case DType::kFloat64:
      return start_floats<Plain<double>>(of, start);
    case DType::kFloat16:
      return start_floats<Narrow<Fp16>>(of, start);
    case DType::kBFloat16:
      return start_floats<Narrow<Bf16>>(of, start);
    case DType::kInt8:
      return start_integers<std::int8_t>(of, start);
    case DType::kInt32:
      return start_integers<std::int32_t>(of, start);
    case DType::kInt64:
      return start_integers<std::int64_t>(of, start);
    case DType::kUInt8:
      return start_integers<std::uint8_t>(of, start);
    case DType::kInt16:
      return start_integers<std::int16_t>(of, start);
    case DType::kUInt16:
      return start_integers<std::uint16_t>(of, start);
    case DType::kUInt32:
      return start_integers<std::uint32_t>(of, start);
    case DType::kUInt64:
      return start_integers<std::uint64_t>(of, start);
    case DType::kBool:
      return start_bools(of, start);
    case DType::kComplex64:
      return start_pairs<float>(of, start);
    case DType::kComplex128:
      return start_pairs<double>(of, start);
  }
  return cudaErrorInvalidValue;
}

}  // namespace gradwire::cuda
