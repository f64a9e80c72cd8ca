// Folding arrays (codec/simd_reduce.h): one kernel, of which fold() and scale() are cases.
#include "gradwire/base/types.h"
#include "gradwire/cuda/plugin/cast.cuh"
#include "gradwire/cuda/plugin/functions.h"
#include "gradwire/cuda/plugin/share.cuh"

namespace gradwire::cuda {
namespace {

constexpr unsigned kThreads = 256;

// How an element lies in memory, and what it is computed as. Results that are NaN have one form.
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

// Integers wrap.
template <typename T>
struct Wrapping {
  using type = T;
};
template <>
struct Wrapping<std::int32_t> {
  using type = std::uint32_t;
};
template <>
struct Wrapping<std::int64_t> {
  using type = std::uint64_t;
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

// Of equal values: floats differ at most in the sign of a zero, which min keeps and max drops.
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

// Rounded once a fold.
template <typename Kind, typename Op, unsigned kCount>
__device__ void fold_into(typename Kind::Stored (&acc)[kCount],
                          const typename Kind::Stored (&x)[kCount]) {
#pragma unroll
  for (unsigned i = 0; i < kCount; ++i)
    acc[i] = Kind::narrow(Op::apply(Kind::widen(acc[i]), Kind::widen(x[i])));
}

// The sums of floats are a kernel of their own: all others look at each tile which op they are of.
template <bool kSums, typename Kind, unsigned kCount>
__device__ void fold_by(ReduceOp op, typename Kind::Stored (&acc)[kCount],
                        const typename Kind::Stored (&x)[kCount]) {
  if (kSums || op == ReduceOp::kSum || op == ReduceOp::kAvg)
    fold_into<Kind, Sum>(acc, x);
  else if (op == ReduceOp::kMin)
    fold_into<Kind, Min>(acc, x);
  else if (op == ReduceOp::kMax)
    fold_into<Kind, Max>(acc, x);
  else
    fold_into<Kind, Prod>(acc, x);
}

template <typename Kind, unsigned kCount>
__device__ void scale_by(typename Kind::Value factor, typename Kind::Stored (&acc)[kCount]) {
  if constexpr (std::is_floating_point_v<typename Kind::Value>) {
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) acc[i] = Kind::narrow(Kind::widen(acc[i]) * factor);
  }
}

struct Folded {
  ReduceOp op;
  const std::byte* x;
  std::ptrdiff_t stride;
  int count;
  void* y;
  bool scales;
  double factor;
  std::uint64_t n;
};

// Of one thread: as many loads as may wait at once without many registers.
template <typename T, unsigned kWide>
constexpr unsigned kCountOf = kWide == 1 ? 8 : (sizeof(T) == 1 ? kWide : 2 * kWide);

template <typename Kind, bool kSums, unsigned kWide>
__global__ void __launch_bounds__(kThreads) fold_kernel(Folded of) {
  using T = typename Kind::Stored;
  constexpr unsigned kCount = kCountOf<T, kWide>;
  const Share<kThreads, kCount, kWide> share{threadIdx.x};
  const auto factor = static_cast<typename Kind::Value>(of.factor);
  for (std::uint64_t begin = std::uint64_t{blockIdx.x} * share.kTile; begin < of.n;
       begin += std::uint64_t{gridDim.x} * share.kTile) {
    const std::byte* from = of.x + begin * sizeof(T);
    T acc[kCount], x[kCount];
    share.load(reinterpret_cast<const T*>(from), of.n - begin, acc);
    for (int i = 1; i < of.count; ++i) {
      from += of.stride;
      share.load(reinterpret_cast<const T*>(from), of.n - begin, x);
      fold_by<kSums, Kind>(of.op, acc, x);
    }
    if (of.scales) scale_by<Kind>(factor, acc);
    share.store(static_cast<T*>(of.y) + begin, of.n - begin, acc);
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
  const bool sums = of.op == ReduceOp::kSum || of.op == ReduceOp::kAvg;
  return sums ? start<Kind, true>(of, stream) : start<Kind, false>(of, stream);
}

template <typename T>
Status start_integers(const Folded& of, Stream stream) {
  if (of.scales) return cudaErrorInvalidValue;
  return start<Plain<T>, false>(of, stream);
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
  }
  return cudaErrorInvalidValue;
}

Status fold_all(int dtype, int op, const void* x, std::uint64_t stride, int count, void* y,
                double factor, std::uint64_t n, Stream stream) {
  if (count < 1) return cudaErrorInvalidValue;
  const Folded of{static_cast<ReduceOp>(op),
                  static_cast<const std::byte*>(x),
                  static_cast<std::ptrdiff_t>(stride),
                  count,
                  y,
                  factor != 1,
                  factor,
                  n};
  return start(static_cast<DType>(dtype), of, stream);
}

// Of two arrays, of which the second may lie anywhere.
Status fold(int dtype, int op, void* acc, const void* x, std::uint64_t n, Stream stream) {
  const std::uint64_t stride =
      reinterpret_cast<std::uintptr_t>(x) - reinterpret_cast<std::uintptr_t>(acc);
  return fold_all(dtype, op, acc, stride, 2, acc, 1, n, stream);
}

Status scale(int dtype, void* x, double factor, std::uint64_t n, Stream stream) {
  const auto* const from = static_cast<const std::byte*>(x);
  return start(static_cast<DType>(dtype), {ReduceOp::kSum, from, 0, 1, x, true, factor, n}, stream);
}

}  // namespace

void fill_fold(Api& api) {
  api.fold = fold;
  api.fold_all = fold_all;
  api.scale = scale;
}

}  // namespace gradwire::cuda
