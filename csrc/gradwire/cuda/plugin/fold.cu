// Folds arrays (codec/simd/simd_reduce.h). One kernel serves all functions but the wide ones.
#include "gradwire/cuda/plugin/batch.cuh"
#include "gradwire/cuda/plugin/fold.cuh"
#include "gradwire/cuda/plugin/functions.h"
#include "gradwire/cuda/plugin/share.cuh"

namespace gradwire::cuda {
namespace {

constexpr unsigned kThreads = 256;

// What a launch folds: each span's x, and then its part of each message.
struct Folded {
  Batch<FoldSpan> spans;
  ReduceOp op;
  const std::byte* addends;  // the first message
  std::int64_t stride;       // bytes between the messages
  int count;                 // of messages
  bool scales;
  double factor;
};

// Elements per thread: enough for many loads in flight, without taking many registers.
template <typename T, unsigned kWide>
constexpr unsigned kCountOf = kWide == 1 ? 8 : (sizeof(T) == 1 ? kWide : 2 * kWide);

template <typename Kind, bool kSums, unsigned kWide>
__device__ void fold_tile(const Folded& of, const FoldSpan& span, std::uint64_t tile) {
  using T = typename Kind::Stored;
  constexpr unsigned kCount = kCountOf<T, kWide>;
  const Share<kThreads, kCount, kWide> share{threadIdx.x};
  const std::uint64_t begin = tile * share.kTile, left = span.n - begin;
  typename Kind::Value acc[kCount];
  T x[kCount];
  share.load(reinterpret_cast<const T*>(span.x) + begin, left, x);
  widen_all<Kind>(x, acc);
  const std::byte* from = of.addends + span.addend;
  for (int i = 0; i < of.count; ++i) {
    share.load(reinterpret_cast<const T*>(from) + begin, left, x);
    fold_by<kSums, Kind>(of.op, acc, x);
    from += of.stride;
  }
  if (of.scales) scale_by(of.factor, acc);
  if (of.scales || of.count > 0) narrow_all<Kind>(acc, x);
  share.store(reinterpret_cast<T*>(span.y) + begin, left, x);
}

// Returns the width of what a thread moves at once: 1 where something is not aligned.
__host__ __device__ inline bool is_wide(const Folded& of, const FoldSpan& span) {
  return all_aligned(span.x, span.y) &&
         (of.count == 0 || (is_aligned(of.addends + span.addend) &&
                            of.stride % static_cast<std::int64_t>(kVector) == 0));
}

template <typename Kind>
constexpr unsigned kWideOf = kVector / sizeof(typename Kind::Stored);

template <typename Kind>
std::uint64_t tiles_of(const Folded& of, const FoldSpan& span) {
  using T = typename Kind::Stored;
  return blocks_for(span.n,
                    kThreads * (is_wide(of, span) ? kCountOf<T, kWideOf<Kind>> : kCountOf<T, 1>));
}

template <typename Kind, bool kSums>
__global__ void __launch_bounds__(kThreads) fold_kernel(const __grid_constant__ Folded of) {
  of.spans.each_tile([&](Tile<FoldSpan> tile) {
    if (is_wide(of, tile.span))
      fold_tile<Kind, kSums, kWideOf<Kind>>(of, tile.span, tile.number);
    else
      fold_tile<Kind, kSums, 1>(of, tile.span, tile.number);
  });
}

Status fold_all(DType dtype, Folded of, const FoldSpan* spans, int count, Stream stream) {
  const auto start = [&]<typename Kind, bool kSums>(ReduceOp op, unsigned each) {
    of.op = op;
    const auto in_elements = [each](FoldSpan span) {
      span.n *= each;
      return span;
    };
    return in_batches(
        spans, count, in_elements,
        [&](const FoldSpan& span) { return tiles_of<Kind>(of, in_elements(span)); },
        [&](const Batch<FoldSpan>& batch) {
          of.spans = batch;
          return launch(fold_kernel<Kind, kSums>, batch.tiles(), kThreads, stream, of);
        });
  };
  return start_any(dtype, of.op, of.scales, start);
}

Status fold_spans(int dtype, int op, const FoldSpan* spans, int count, GpuPayloads addends,
                  int divisor, Stream stream) {
  if (addends.count < 0 || addends.jump != 0 || divisor < 1) return cudaErrorInvalidValue;
  const Folded of{{},
                  static_cast<ReduceOp>(op),
                  addends.first,
                  addends.stride,
                  addends.count,
                  divisor != 1,
                  1.0 / divisor};
  return fold_all(static_cast<DType>(dtype), of, spans, count, stream);
}

struct WideFolded {
  Batch<WideSpan> spans;
  const std::byte* addends;
  bool multiplies;
  float factor;
};

template <typename Kind, unsigned kWide>
__device__ void fold_wide_tile(const WideFolded& of, const WideSpan& span, std::uint64_t begin) {
  constexpr unsigned kCount = 8;
  const Share<kThreads, kCount, kWide> share{threadIdx.x};
  const std::uint64_t left = span.n - begin;
  float acc[kCount];
  std::uint16_t x[kCount];
  if (span.own != nullptr) {
    share.load(reinterpret_cast<const std::uint16_t*>(span.own) + begin, left, x);
    widen_all<Kind>(x, acc);
  } else {
    share.load(span.sum + begin, left, acc);
  }
  share.load(reinterpret_cast<const std::uint16_t*>(of.addends + span.addend) + begin, left, x);
  if (of.multiplies)
    fold_into<Kind, ReduceOp::kProd>(acc, x);
  else
    fold_into<Kind, ReduceOp::kSum>(acc, x);
  if (span.y == nullptr) return share.store(span.sum + begin, left, acc);
#pragma unroll
  for (float& each : acc) each *= of.factor;
  narrow_all<Kind>(acc, x);
  share.store(reinterpret_cast<std::uint16_t*>(span.y) + begin, left, x);
}

constexpr unsigned kWideTile = kThreads * 8;

template <typename Kind>
__global__ void __launch_bounds__(kThreads)
    fold_wide_kernel(const __grid_constant__ WideFolded of) {
  of.spans.each_tile([&](Tile<WideSpan> tile) {
    const WideSpan& span = tile.span;
    if (all_aligned(span.own, span.sum, span.y, of.addends + span.addend))
      fold_wide_tile<Kind, 4>(of, span, tile.number * kWideTile);
    else
      fold_wide_tile<Kind, 1>(of, span, tile.number * kWideTile);
  });
}

Status fold_wide_spans(int dtype, int op, const WideSpan* spans, int count,
                       const std::byte* addends, int divisor, Stream stream) {
  const auto what = static_cast<ReduceOp>(op);
  const bool multiplies = what == ReduceOp::kProd;
  const auto type = static_cast<DType>(dtype);
  if (divisor < 1 || (what > ReduceOp::kAvg && !multiplies) ||
      (type != DType::kFloat16 && type != DType::kBFloat16))
    return cudaErrorInvalidValue;
  WideFolded of{{}, addends, multiplies, static_cast<float>(1.0 / divisor)};
  return in_batches(
      spans, count, [](const WideSpan& span) { return blocks_for(span.n, kWideTile); },
      [&](const Batch<WideSpan>& batch) {
        of.spans = batch;
        return launch(type == DType::kFloat16 ? fold_wide_kernel<NarrowFloat<GpuFp16>>
                                              : fold_wide_kernel<NarrowFloat<GpuBf16>>,
                      batch.tiles(), kThreads, stream, of);
      });
}

Status scale(int dtype, void* x, double factor, std::uint64_t n, Stream stream) {
  const FoldSpan span{static_cast<std::byte*>(x), static_cast<std::byte*>(x), n, 0};
  return fold_all(static_cast<DType>(dtype), {{}, ReduceOp::kSum, nullptr, 0, 0, true, factor},
                  &span, 1, stream);
}

}  // namespace

void fill_fold(Api& api) {
  api.fold_spans = fold_spans;
  api.fold_wide_spans = fold_wide_spans;
  api.scale = scale;
}

}  // namespace gradwire::cuda
