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
struct NarrowFloat {
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

// Combines two values. Bits of Bool are truth values, as are the operands of logical ops.
template <ReduceOp kOp, typename T>
__device__ T combine(T a, T b) {
  using U = typename Wrapping<T>::type;
  using enum ReduceOp;
  if constexpr (kOp == kSum)
    return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
  else if constexpr (kOp == kProd)
    return static_cast<T>(static_cast<U>(a) * static_cast<U>(b));
  else if constexpr (kOp == kMin || kOp == kMax)
    return extreme<T, kOp == kMin>(a, b);
  else if constexpr (kOp == kBand)
    return static_cast<T>(a & b);
  else if constexpr (kOp == kBor)
    return static_cast<T>(a | b);
  else if constexpr (kOp == kBxor)
    return static_cast<T>(a ^ b);
  else if constexpr (kOp == kLand)
    return static_cast<T>(a != 0 && b != 0);
  else if constexpr (kOp == kLor)
    return static_cast<T>(a != 0 || b != 0);
  else
    return static_cast<T>((a != 0) != (b != 0));
}

// acc := acc (op) x. acc stays in registers, in the computing type, so that a result is rounded
// only once, when it is stored.
template <typename Kind, ReduceOp kOp, unsigned kCount>
__device__ void fold_into(typename Kind::Value (&acc)[kCount],
                          const typename Kind::Stored (&x)[kCount]) {
#pragma unroll
  for (unsigned i = 0; i < kCount; ++i) acc[i] = combine<kOp>(acc[i], Kind::widen(x[i]));
}

template <typename Kind, unsigned kCount>
__device__ void fold_bits(ReduceOp op, typename Kind::Value (&acc)[kCount],
                          const typename Kind::Stored (&x)[kCount]) {
  using enum ReduceOp;
  switch (op) {
    case kBand:
      return fold_into<Kind, kBand>(acc, x);
    case kBor:
      return fold_into<Kind, kBor>(acc, x);
    case kBxor:
      return fold_into<Kind, kBxor>(acc, x);
    case kLand:
      return fold_into<Kind, kLand>(acc, x);
    case kLor:
      return fold_into<Kind, kLor>(acc, x);
    default:
      return fold_into<Kind, kLxor>(acc, x);
  }
}

// Sums of floats have a kernel of their own, kSums; all other kernels look up their op for each
// tile.
template <bool kSums, typename Kind, unsigned kCount>
__device__ void fold_by(ReduceOp op, typename Kind::Value (&acc)[kCount],
                        const typename Kind::Stored (&x)[kCount]) {
  using enum ReduceOp;
  constexpr bool kBits = std::is_integral_v<typename Kind::Value>;
  if constexpr (std::is_same_v<Kind, Bool>)
    fold_bits<Kind>(op, acc, x);
  else if (kSums || op == kSum || op == kAvg)
    fold_into<Kind, kSum>(acc, x);
  else if (op == kMin)
    fold_into<Kind, kMin>(acc, x);
  else if (op == kMax)
    fold_into<Kind, kMax>(acc, x);
  else if (!kBits || op == kProd)
    fold_into<Kind, kProd>(acc, x);
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

// Calls start<Kind, kSums>(op, elements of Kind in one of the dtype) for what decides which kernel
// folds.
template <typename Start>
Status start_any(DType dtype, ReduceOp op, bool scales, Start start) {
  using enum ReduceOp;
  const auto floats = [&]<typename Kind>(unsigned each, ReduceOp last) -> Status {
    if (op > last) return cudaErrorInvalidValue;
    return op == kSum || op == kAvg ? start.template operator()<Kind, true>(op, each)
                                    : start.template operator()<Kind, false>(op, each);
  };
  const auto integers = [&]<typename Kind>(ReduceOp its) -> Status {
    if (op == kAvg || scales) return cudaErrorInvalidValue;
    return start.template operator()<Kind, false>(its, 1);
  };
  const auto bools = [&] {  // a sum of them is true where one is (codec/simd/simd_reduce.h)
    if (op == kSum || op == kMax || op == kBor) return kLor;
    return op == kProd || op == kMin || op == kBand ? kLand : op;
  };
  switch (dtype) {
    case DType::kFloat32:
      return floats.template operator()<Plain<float>>(1, kProd);
    case DType::kFloat64:
      return floats.template operator()<Plain<double>>(1, kProd);
    case DType::kFloat16:
      return floats.template operator()<NarrowFloat<GpuFp16>>(1, kProd);
    case DType::kBFloat16:
      return floats.template operator()<NarrowFloat<GpuBf16>>(1, kProd);
    case DType::kComplex64:
      return floats.template operator()<Plain<float>>(2, kAvg);
    case DType::kComplex128:
      return floats.template operator()<Plain<double>>(2, kAvg);
    case DType::kInt8:
      return integers.template operator()<Plain<std::int8_t>>(op);
    case DType::kInt16:
      return integers.template operator()<Plain<std::int16_t>>(op);
    case DType::kInt32:
      return integers.template operator()<Plain<std::int32_t>>(op);
    case DType::kInt64:
      return integers.template operator()<Plain<std::int64_t>>(op);
    case DType::kUInt8:
      return integers.template operator()<Plain<std::uint8_t>>(op);
    case DType::kUInt16:
      return integers.template operator()<Plain<std::uint16_t>>(op);
    case DType::kUInt32:
      return integers.template operator()<Plain<std::uint32_t>>(op);
    case DType::kUInt64:
      return integers.template operator()<Plain<std::uint64_t>>(op);
    case DType::kBool:
      return integers.template operator()<Bool>(bools());
  }
  return cudaErrorInvalidValue;
}

}  // namespace gradwire::cuda
