// Folds arrays (codec/simd/simd_reduce.h). One kernel serves all functions but the wide ones.
#include "gradwire/base/types.h"
#include "gradwire/cuda/plugin/batch.cuh"
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

// What a launch folds: each run's x, and then its part of each message.
struct Folded {
  Batch<FoldRun> runs;
  ReduceOp op;
  const std::byte* addends;  // the first message
  std::ptrdiff_t stride;     // bytes between the messages
  int count;                 // of messages
  bool scales;
  double factor;  // for floats
  int divisor;    // for integers; 0: there is none
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
__device__ void fold_tile(const Folded& of, const FoldRun& run, std::uint64_t tile) {
  using T = typename Kind::Stored;
  constexpr unsigned kCount = kCountOf<T, kWide>;
  const Share<kThreads, kCount, kWide> share{threadIdx.x};
  const std::uint64_t begin = tile * share.kTile, left = run.n - begin;
  typename Kind::Value acc[kCount];
  T x[kCount];
  share.load(reinterpret_cast<const T*>(run.x) + begin, left, x);
  widen_all<Kind>(x, acc);
  const std::byte* from = of.addends + run.addend;
  for (int i = 0; i < of.count; ++i) {
    share.load(reinterpret_cast<const T*>(from) + begin, left, x);
    fold_by<kSums, Kind>(of.op, acc, x);
    from += of.stride;
  }
  if (of.scales) scale_by(of, acc);
  if (of.scales || of.count > 0) narrow_all<Kind>(acc, x);
  share.store(reinterpret_cast<T*>(run.y) + begin, left, x);
}

// Returns the width of what a thread moves at once: 1 where something is not aligned.
__host__ __device__ inline bool is_wide(const Folded& of, const FoldRun& run) {
  return all_aligned(run.x, run.y) &&
         (of.count == 0 || (is_aligned(of.addends + run.addend) &&
                            of.stride % static_cast<std::ptrdiff_t>(kVector) == 0));
}

template <typename Kind>
constexpr unsigned kWideOf = kVector / sizeof(typename Kind::Stored);

template <typename Kind>
std::uint64_t tiles_of(const Folded& of, const FoldRun& run) {
  using T = typename Kind::Stored;
  return blocks_for(run.n,
                    kThreads * (is_wide(of, run) ? kCountOf<T, kWideOf<Kind>> : kCountOf<T, 1>));
}

template <typename Kind, bool kSums>
__global__ void __launch_bounds__(kThreads) fold_kernel(const __grid_constant__ Folded of) {
  for (std::uint64_t tile = blockIdx.x; tile < of.runs.tiles(); tile += gridDim.x) {
    const unsigned r = of.runs.find(tile);
    const FoldRun& run = of.runs.at[r];
    if (is_wide(of, run))
      fold_tile<Kind, kSums, kWideOf<Kind>>(of, run, tile - of.runs.first[r]);
    else
      fold_tile<Kind, kSums, 1>(of, run, tile - of.runs.first[r]);
  }
}

// What the caller gives of a call: the runs, with n in elements.
struct Given {
  const FoldRun* runs;
  int count;
};

template <typename Kind, bool kSums>
Status start(Folded of, const Given& given, Stream stream, unsigned each = 1) {
  const auto in_elements = [each](FoldRun run) {
    run.n *= each;
    return run;
  };
  return in_batches(
      given.runs, given.count, in_elements,
      [&](const FoldRun& run) { return tiles_of<Kind>(of, in_elements(run)); },
      [&](const Batch<FoldRun>& batch) {
        of.runs = batch;
        return launch(fold_kernel<Kind, kSums>, batch.tiles(), kThreads, stream, of);
      });
}

template <typename Kind>
Status start_floats(const Folded& of, const Given& given, Stream stream, unsigned each = 1) {
  if (of.op > ReduceOp::kProd) return cudaErrorInvalidValue;
  const bool sums = of.op == ReduceOp::kSum || of.op == ReduceOp::kAvg;
  return sums ? start<Kind, true>(of, given, stream, each)
              : start<Kind, false>(of, given, stream, each);
}

template <typename T>
Status start_integers(const Folded& of, const Given& given, Stream stream) {
  if (of.divisor == 0) return cudaErrorInvalidValue;
  return start<Plain<T>, false>(of, given, stream);
}

template <typename T>
Status start_pairs(const Folded& of, const Given& given, Stream stream) {
  if (of.op > ReduceOp::kAvg) return cudaErrorInvalidValue;
  return start_floats<Plain<T>>(of, given, stream, 2);
}

// A sum of bools is true where one of them is (codec/simd/simd_reduce.h).
Status start_bools(Folded of, const Given& given, Stream stream) {
  if (of.op == ReduceOp::kAvg || of.scales) return cudaErrorInvalidValue;
  const ReduceOp op = of.op;
  if (op == ReduceOp::kSum || op == ReduceOp::kMax || op == ReduceOp::kBor)
    of.op = ReduceOp::kLor;
  else if (op == ReduceOp::kProd || op == ReduceOp::kMin || op == ReduceOp::kBand)
    of.op = ReduceOp::kLand;
  return start<Bool, false>(of, given, stream);
}

Status start_any(DType dtype, const Folded& of, const Given& given, Stream stream) {
  switch (dtype) {
    case DType::kFloat32:
      return start_floats<Plain<float>>(of, given, stream);
    case DType::kFloat64:
      return start_floats<Plain<double>>(of, given, stream);
    case DType::kFloat16:
      return start_floats<Narrow<Fp16>>(of, given, stream);
    case DType::kBFloat16:
      return start_floats<Narrow<Bf16>>(of, given, stream);
    case DType::kInt8:
      return start_integers<std::int8_t>(of, given, stream);
    case DType::kInt32:
      return start_integers<std::int32_t>(of, given, stream);
    case DType::kInt64:
      return start_integers<std::int64_t>(of, given, stream);
    case DType::kUInt8:
      return start_integers<std::uint8_t>(of, given, stream);
    case DType::kInt16:
      return start_integers<std::int16_t>(of, given, stream);
    case DType::kUInt16:
      return start_integers<std::uint16_t>(of, given, stream);
    case DType::kUInt32:
      return start_integers<std::uint32_t>(of, given, stream);
    case DType::kUInt64:
      return start_integers<std::uint64_t>(of, given, stream);
    case DType::kBool:
      return start_bools(of, given, stream);
    case DType::kComplex64:
      return start_pairs<float>(of, given, stream);
    case DType::kComplex128:
      return start_pairs<double>(of, given, stream);
  }
  return cudaErrorInvalidValue;
}

Folded folded(int op, const Payloads& addends, int divisor) {
  return {{},
          static_cast<ReduceOp>(op),
          addends.first,
          static_cast<std::ptrdiff_t>(addends.stride),
          addends.count,
          divisor != 1,
          1.0 / divisor,
          divisor};
}

Status fold_runs(int dtype, int op, const FoldRun* runs, int count, Payloads addends, int divisor,
                 Stream stream) {
  if (addends.count < 0 || divisor < 1) return cudaErrorInvalidValue;
  return start_any(static_cast<DType>(dtype), folded(op, addends, divisor), {runs, count}, stream);
}

Status fold_all(int dtype, int op, const void* x, std::uint64_t stride, int count, void* y,
                int divisor, std::uint64_t n, Stream stream) {
  const auto* const from = static_cast<const std::byte*>(x);
  const FoldRun run{from, static_cast<std::byte*>(y), n, 0};
  return fold_runs(dtype, op, &run, 1, {from + stride, stride, count - 1}, divisor, stream);
}

Status fold(int dtype, int op, void* acc, const void* x, std::uint64_t n, Stream stream) {
  const FoldRun run{static_cast<std::byte*>(acc), static_cast<std::byte*>(acc), n, 0};
  return fold_runs(dtype, op, &run, 1, {static_cast<const std::byte*>(x), 0, 1}, 1, stream);
}

struct WideFolded {
  Batch<WideRun> runs;
  const std::byte* addends;
  bool multiplies;
  float factor;
};

template <typename Kind, unsigned kWide>
__device__ void fold_wide_tile(const WideFolded& of, const WideRun& run, std::uint64_t begin) {
  constexpr unsigned kCount = 8;
  const Share<kThreads, kCount, kWide> share{threadIdx.x};
  const std::uint64_t left = run.n - begin;
  float acc[kCount];
  std::uint16_t x[kCount];
  if (run.own != nullptr) {
    share.load(reinterpret_cast<const std::uint16_t*>(run.own) + begin, left, x);
    widen_all<Kind>(x, acc);
  } else {
    share.load(run.sum + begin, left, acc);
  }
  share.load(reinterpret_cast<const std::uint16_t*>(of.addends + run.addend) + begin, left, x);
  if (of.multiplies)
    fold_into<Kind, Prod>(acc, x);
  else
    fold_into<Kind, Sum>(acc, x);
  if (run.y == nullptr) return share.store(run.sum + begin, left, acc);
#pragma unroll
  for (float& each : acc) each *= of.factor;
  narrow_all<Kind>(acc, x);
  share.store(reinterpret_cast<std::uint16_t*>(run.y) + begin, left, x);
}

constexpr unsigned kWideTile = kThreads * 8;

template <typename Kind>
__global__ void __launch_bounds__(kThreads)
    fold_wide_kernel(const __grid_constant__ WideFolded of) {
  for (std::uint64_t tile = blockIdx.x; tile < of.runs.tiles(); tile += gridDim.x) {
    const unsigned r = of.runs.find(tile);
    const WideRun& run = of.runs.at[r];
    const std::uint64_t begin = (tile - of.runs.first[r]) * kWideTile;
    if (all_aligned(run.own, run.sum, run.y, of.addends + run.addend))
      fold_wide_tile<Kind, 4>(of, run, begin);
    else
      fold_wide_tile<Kind, 1>(of, run, begin);
  }
}

Status fold_wide_runs(int dtype, int op, const WideRun* runs, int count, const std::byte* addends,
                      int divisor, Stream stream) {
  const auto what = static_cast<ReduceOp>(op);
  const bool multiplies = what == ReduceOp::kProd;
  const auto type = static_cast<DType>(dtype);
  if (divisor < 1 || (what > ReduceOp::kAvg && !multiplies) ||
      (type != DType::kFloat16 && type != DType::kBFloat16))
    return cudaErrorInvalidValue;
  WideFolded of{{}, addends, multiplies, static_cast<float>(1.0 / divisor)};
  return in_batches(
      runs, count, [](const WideRun& run) { return run; },
      [](const WideRun& run) { return blocks_for(run.n, kWideTile); },
      [&](const Batch<WideRun>& batch) {
        of.runs = batch;
        return launch(type == DType::kFloat16 ? fold_wide_kernel<Narrow<Fp16>>
                                              : fold_wide_kernel<Narrow<Bf16>>,
                      batch.tiles(), kThreads, stream, of);
      });
}

Status fold_wide(int dtype, int op, const void* own, float* sum, const void* x, void* y,
                 int divisor, std::uint64_t n, Stream stream) {
  const WideRun run{static_cast<const std::byte*>(own), sum, static_cast<std::byte*>(y), n, 0};
  return fold_wide_runs(dtype, op, &run, 1, static_cast<const std::byte*>(x), divisor, stream);
}

Status average(int dtype, void* x, int divisor, std::uint64_t n, Stream stream) {
  const FoldRun run{static_cast<std::byte*>(x), static_cast<std::byte*>(x), n, 0};
  return fold_runs(dtype, static_cast<int>(ReduceOp::kSum), &run, 1, {}, divisor, stream);
}

Status scale(int dtype, void* x, double factor, std::uint64_t n, Stream stream) {
  const FoldRun run{static_cast<std::byte*>(x), static_cast<std::byte*>(x), n, 0};
  return start_any(static_cast<DType>(dtype), {{}, ReduceOp::kSum, nullptr, 0, 0, true, factor, 0},
                   {&run, 1}, stream);
}

}  // namespace

void fill_fold(Api& api) {
  api.fold = fold;
  api.fold_all = fold_all;
  api.fold_wide = fold_wide;
  api.fold_runs = fold_runs;
  api.fold_wide_runs = fold_wide_runs;
  api.average = average;
  api.scale = scale;
}

}  // namespace gradwire::cuda
