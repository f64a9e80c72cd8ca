// Folds arrays (codec/simd/simd_reduce.h). One kernel serves all functions but the wide ones.
#include "gradwire/cuda/plugin/batch.cuh"
#include "gradwire/cuda/plugin/fold.cuh"
#include "gradwire/cuda/plugin/functions.h"
#include "gradwire/cuda/plugin/share.cuh"

namespace gradwire::cuda {
namespace {

constexpr unsigned kThreads = 256;

// What a launch folds: each run's x, and then its part of each message.
struct Folded {
  Batch<FoldRun> runs;
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
  if (of.scales) scale_by(of.factor, acc);
  if (of.scales || of.count > 0) narrow_all<Kind>(acc, x);
  share.store(reinterpret_cast<T*>(run.y) + begin, left, x);
}

// Returns the width of what a thread moves at once: 1 where something is not aligned.
__host__ __device__ inline bool is_wide(const Folded& of, const FoldRun& run) {
  return all_aligned(run.x, run.y) &&
         (of.count == 0 || (is_aligned(of.addends + run.addend) &&
                            of.stride % static_cast<std::int64_t>(kVector) == 0));
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
  of.runs.each_tile([&](Tile<FoldRun> tile) {
    if (is_wide(of, tile.run))
      fold_tile<Kind, kSums, kWideOf<Kind>>(of, tile.run, tile.number);
    else
      fold_tile<Kind, kSums, 1>(of, tile.run, tile.number);
  });
}

Status fold_all(DType dtype, Folded of, const FoldRun* runs, int count, Stream stream) {
  const auto start = [&]<typename Kind, bool kSums>(ReduceOp op, unsigned each) {
    of.op = op;
    const auto in_elements = [each](FoldRun run) {
      run.n *= each;
      return run;
    };
    return in_batches(
        runs, count, in_elements,
        [&](const FoldRun& run) { return tiles_of<Kind>(of, in_elements(run)); },
        [&](const Batch<FoldRun>& batch) {
          of.runs = batch;
          return launch(fold_kernel<Kind, kSums>, batch.tiles(), kThreads, stream, of);
        });
  };
  return start_any(dtype, of.op, of.scales, start);
}

Status fold_runs(int dtype, int op, const FoldRun* runs, int count, Payloads addends, int divisor,
                 Stream stream) {
  if (addends.count < 0 || addends.jump != 0 || divisor < 1) return cudaErrorInvalidValue;
  const Folded of{{},
                  static_cast<ReduceOp>(op),
                  addends.first,
                  addends.stride,
                  addends.count,
                  divisor != 1,
                  1.0 / divisor};
  return fold_all(static_cast<DType>(dtype), of, runs, count, stream);
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
    fold_into<Kind, ReduceOp::kProd>(acc, x);
  else
    fold_into<Kind, ReduceOp::kSum>(acc, x);
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
  of.runs.each_tile([&](Tile<WideRun> tile) {
    const WideRun& run = tile.run;
    if (all_aligned(run.own, run.sum, run.y, of.addends + run.addend))
      fold_wide_tile<Kind, 4>(of, run, tile.number * kWideTile);
    else
      fold_wide_tile<Kind, 1>(of, run, tile.number * kWideTile);
  });
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
      runs, count, [](const WideRun& run) { return blocks_for(run.n, kWideTile); },
      [&](const Batch<WideRun>& batch) {
        of.runs = batch;
        return launch(type == DType::kFloat16 ? fold_wide_kernel<Narrow<Fp16>>
                                              : fold_wide_kernel<Narrow<Bf16>>,
                      batch.tiles(), kThreads, stream, of);
      });
}

Status scale(int dtype, void* x, double factor, std::uint64_t n, Stream stream) {
  const FoldRun run{static_cast<std::byte*>(x), static_cast<std::byte*>(x), n, 0};
  return fold_all(static_cast<DType>(dtype), {{}, ReduceOp::kSum, nullptr, 0, 0, true, factor},
                  &run, 1, stream);
}

}  // namespace

void fill_fold(Api& api) {
  api.fold_runs = fold_runs;
  api.fold_wide_runs = fold_wide_runs;
  api.scale = scale;
}

}  // namespace gradwire::cuda
