// Folds arrays (codec/simd/simd_reduce.h). One kernel serves all functions but fold_wide().
#include "gradwire/base/types.h"
#include "gradwire/cuda/plugin/cast.cuh"
#include "gradwire/cuda/plugin/functions.h"
#include "gradwire/cuda/plugin/share.cuh"

namespace gradwire::cuda {
namespace {

constexpr unsigned kThreads = 256;

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
__device__ float same(float a, float b, bool keeps) {
  const std::uint32_t x = __float_as_uint(a), y = __float_as_uint(b);
  return __uint_as_float(keeps ? x | y : x & y);
}
__device__ double same(double a, double b, bool keeps) {
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

struct Folded {
  ReduceOp op;
  const std::byte* x;
  std::ptrdiff_t stride;
  int count;
  void* y;
  bool scales;
  double factor;  // for floats
  int divisor;    // for integers; 0: there is none
  std::uint64_t n;
};

// Scales or averages acc. Integers are divided in 64 bits: there may be more ranks than their type
// has numbers.
template <typename Value, unsigned kCount>
__device__ void scale_by(const Folded& of, Value (&acc)[kCount]) {
  if constexpr (std::is_floating_point_v<Value>) {
    const auto factor = static_cast<Value>(of.factor);
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) acc[i] = acc[i] * factor;
  } else if constexpr (!std::is_same_v<Value, bool>) {
    using Wide = std::conditional_t<std::is_signed_v<Value>, std::int64_t, std::uint64_t>;
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i)
      acc[i] = static_cast<Value>(static_cast<Wide>(acc[i]) / static_cast<Wide>(of.divisor));
  }
}

// Elements per thread: enough for many loads in flight, without taking many registers.
template <typename T, unsigned kWide>
constexpr unsigned kCountOf = kWide == 1 ? 8 : (sizeof(T) == 1 ? kWide : 2 * kWide);

template <typename Kind, bool kSums, unsigned kWide>
__global__ void __launch_bounds__(kThreads) fold_kernel(Folded of) {
  using T = typename Kind::Stored;
  constexpr unsigned kCount = kCountOf<T, kWide>;
  const Share<kThreads, kCount, kWide> share{threadIdx.x};
  for (std::uint64_t begin = std::uint64_t{blockIdx.x} * share.kTile; begin < of.n;
       begin += std::uint64_t{gridDim.x} * share.kTile) {
    const std::byte* from = of.x + begin * sizeof(T);
    typename Kind::Value acc[kCount];
    T x[kCount];
    share.load(reinterpret_cast<const T*>(from), of.n - begin, x);
    widen_all<Kind>(x, acc);
    for (int i = 1; i < of.count; ++i) {
      from += of.stride;
      share.load(reinterpret_cast<const T*>(from), of.n - begin, x);
      fold_by<kSums, Kind>(of.op, acc, x);
    }
    if (of.scales) scale_by(of, acc);
    if (of.scales || of.count > 1) narrow_all<Kind>(acc, x);
    share.store(static_cast<T*>(of.y) + begin, of.n - begin, x);
  }
}

template <typename Kind, bool kSums, unsigned kWide>
Status start(const Folded& of, Stream stream) {
  constexpr unsigned kTile = kThreads * kCountOf<typename Kind::Stored, kWide>;
  return launch(fold_kernel<Kind, kSums, kWide>, blocks_for(of.n, kTile), kThreads, stream, of);
}

template <typename Kind, bool kSums>
Status start(const Folded& of, Stream stream) {
  if (all_aligned(of.x, of.y) && of.stride % static_cast<std::ptrdiff_t>(kVector) == 0)
    return start<Kind, kSums, kVector / sizeof(typename Kind::Stored)>(of, stream);
  return start<Kind, kSums, 1>(of, stream);
}

template <typename Kind>
Status start_floats(const Folded& of, Stream stream) {
  if (of.op > ReduceOp::kProd) return cudaErrorInvalidValue;
  const bool sums = of.op == ReduceOp::kSum || of.op == ReduceOp::kAvg;
  return sums ? start<Kind, true>(of, stream) : start<Kind, false>(of, stream);
}

template <typename T>
Status start_integers(const Folded& of, Stream stream) {
  if (of.divisor == 0) return cudaErrorInvalidValue;
  return start<Plain<T>, false>(of, stream);
}

template <typename T>
Status start_pairs(Folded of, Stream stream) {
  if (of.op > ReduceOp::kAvg) return cudaErrorInvalidValue;
  of.n *= 2;
  return start_floats<Plain<T>>(of, stream);
}

// A sum of bools is true where one of them is (codec/simd/simd_reduce.h).
Status start_bools(Folded of, Stream stream) {
  if (of.op == ReduceOp::kAvg || of.scales) return cudaErrorInvalidValue;
  const ReduceOp op = of.op;
  if (op == ReduceOp::kSum || op == ReduceOp::kMax || op == ReduceOp::kBor)
    of.op = ReduceOp::kLor;
  else if (op == ReduceOp::kProd || op == ReduceOp::kMin || op == ReduceOp::kBand)
    of.op = ReduceOp::kLand;
  return start<Bool, false>(of, stream);
}

Status start(DType dtype, const Folded& of, Stream stream) {
  switch (dtype) {
    case DType::kFloat32:
      return start_floats<Plain<float>>(of, stream);
    case DType::kFloat64:
      return start_floats<Plain<double>>(of, stream);
    case DType::kFloat16:
      return start_floats<Narrow<Fp16>>(of, stream);
    case DType::kBFloat16:
      return start_floats<Narrow<Bf16>>(of, stream);
    case DType::kInt8:
      return start_integers<std::int8_t>(of, stream);
    case DType::kInt32:
      return start_integers<std::int32_t>(of, stream);
    case DType::kInt64:
      return start_integers<std::int64_t>(of, stream);
    case DType::kUInt8:
      return start_integers<std::uint8_t>(of, stream);
    case DType::kInt16:
      return start_integers<std::int16_t>(of, stream);
    case DType::kUInt16:
      return start_integers<std::uint16_t>(of, stream);
    case DType::kUInt32:
      return start_integers<std::uint32_t>(of, stream);
    case DType::kUInt64:
      return start_integers<std::uint64_t>(of, stream);
    case DType::kBool:
      return start_bools(of, stream);
    case DType::kComplex64:
      return start_pairs<float>(of, stream);
    case DType::kComplex128:
      return start_pairs<double>(of, stream);
  }
  return cudaErrorInvalidValue;
}

Status fold_all(int dtype, int op, const void* x, std::uint64_t stride, int count, void* y,
                int divisor, std::uint64_t n, Stream stream) {
  if (count < 1 || divisor < 1) return cudaErrorInvalidValue;
  const Folded of{static_cast<ReduceOp>(op),
                  static_cast<const std::byte*>(x),
                  static_cast<std::ptrdiff_t>(stride),
                  count,
                  y,
                  divisor != 1,
                  1.0 / divisor,
                  divisor,
                  n};
  return start(static_cast<DType>(dtype), of, stream);
}

// Folds two arrays. The second may lie anywhere, since the stride is their distance.
Status fold(int dtype, int op, void* acc, const void* x, std::uint64_t n, Stream stream) {
  const std::uint64_t stride =
      reinterpret_cast<std::uintptr_t>(x) - reinterpret_cast<std::uintptr_t>(acc);
  return fold_all(dtype, op, acc, stride, 2, acc, 1, n, stream);
}

struct WideFolded {
  const std::uint16_t* own;
  float* sum;
  const std::uint16_t* x;
  std::uint16_t* y;
  bool multiplies;
  float factor;
  std::uint64_t n;
};

template <typename Kind, unsigned kWide>
__global__ void __launch_bounds__(kThreads) fold_wide_kernel(WideFolded of) {
  constexpr unsigned kCount = 8;
  const Share<kThreads, kCount, kWide> share{threadIdx.x};
  for (std::uint64_t begin = std::uint64_t{blockIdx.x} * share.kTile; begin < of.n;
       begin += std::uint64_t{gridDim.x} * share.kTile) {
    float acc[kCount];
    std::uint16_t x[kCount];
    if (of.own != nullptr) {
      share.load(of.own + begin, of.n - begin, x);
      widen_all<Kind>(x, acc);
    } else {
      share.load(of.sum + begin, of.n - begin, acc);
    }
    share.load(of.x + begin, of.n - begin, x);
    if (of.multiplies)
      fold_into<Kind, Prod>(acc, x);
    else
      fold_into<Kind, Sum>(acc, x);
    if (of.y == nullptr) {
      share.store(of.sum + begin, of.n - begin, acc);
      continue;
    }
#pragma unroll
    for (float& each : acc) each *= of.factor;
    narrow_all<Kind>(acc, x);
    share.store(of.y + begin, of.n - begin, x);
  }
}

template <typename Kind>
Status start_wide(const WideFolded& of, Stream stream) {
  const bool wide = all_aligned(of.own, of.sum, of.x, of.y);
  return launch(wide ? fold_wide_kernel<Kind, 4> : fold_wide_kernel<Kind, 1>,
                blocks_for(of.n, kThreads * 8), kThreads, stream, of);
}

Status fold_wide(int dtype, int op, const void* own, float* sum, const void* x, void* y,
                 int divisor, std::uint64_t n, Stream stream) {
  const auto what = static_cast<ReduceOp>(op);
  const bool multiplies = what == ReduceOp::kProd;
  if (divisor < 1 || (what > ReduceOp::kAvg && !multiplies)) return cudaErrorInvalidValue;
  const WideFolded of{static_cast<const std::uint16_t*>(own),
                      sum,
                      static_cast<const std::uint16_t*>(x),
                      static_cast<std::uint16_t*>(y),
                      multiplies,
                      static_cast<float>(1.0 / divisor),
                      n};
  if (static_cast<DType>(dtype) == DType::kFloat16) return start_wide<Narrow<Fp16>>(of, stream);
  if (static_cast<DType>(dtype) == DType::kBFloat16) return start_wide<Narrow<Bf16>>(of, stream);
  return cudaErrorInvalidValue;
}

Status average(int dtype, void* x, int divisor, std::uint64_t n, Stream stream) {
  const auto op = static_cast<int>(ReduceOp::kSum);
  return fold_all(dtype, op, x, 0, 1, x, divisor, n, stream);
}

Status scale(int dtype, void* x, double factor, std::uint64_t n, Stream stream) {
  const auto* const from = static_cast<const std::byte*>(x);
  return start(static_cast<DType>(dtype), {ReduceOp::kSum, from, 0, 1, x, true, factor, 0, n},
               stream);
}

}  // namespace

void fill_fold(Api& api) {
  api.fold = fold;
  api.fold_all = fold_all;
  api.fold_wide = fold_wide;
  api.average = average;
  api.scale = scale;
}

}  // namespace gradwire::cuda
