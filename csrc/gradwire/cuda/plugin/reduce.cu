// An all_reduce as one kernel over staging, with the additions of the schedule `direct`. The same
// block of all ranks takes the same tiles, and waits for no other.
//
//   one shot:   x -> own staging | meet | sum of all ranks' staging -> y
//   two shots:  x -> own staging | meet | sum of the own part -> y, own staging | meet | others ->
//   y
#include "gradwire/cuda/plugin/fold.cuh"
#include "gradwire/cuda/plugin/functions.h"
#include "gradwire/cuda/plugin/steps.cuh"

namespace gradwire::cuda {
namespace {

struct Reduction {
  Steps steps;
  ReduceOp op;
  bool scales;
  double factor;
};

// How the threads of a block share a stretch of a tile.
template <typename T>
constexpr unsigned kVectorOf = kVector / sizeof(T);
template <typename T, unsigned kWide>
using ShareOf = Share<kStagedThreads, kVectorOf<T>, kWide>;
template <typename T>
constexpr std::uint32_t kStretch = kStagedThreads * kVectorOf<T>;

template <typename T, unsigned kWide>
__device__ void copy_stretches(T* to, const T* from, std::uint64_t n) {
  const ShareOf<T, kWide> share{threadIdx.x};
  T x[kVectorOf<T>];
  for (std::uint64_t at = 0; at < n; at += kStretch<T>) {
    share.load(from + at, n - at, x);
    share.store(to + at, n - at, x);
  }
}
template <typename T>
__device__ void copy_tile(T* to, const T* from, std::uint64_t n) {
  if (all_aligned(to, from))
    copy_stretches<T, kVectorOf<T>>(to, from, n);
  else
    copy_stretches<T, 1>(to, from, n);
}

// Adds a tile up from staging tile `staged` of all ranks, but for the own x. The sum goes to y, and
// to `shown` unless that is null.
template <typename Kind, bool kSums, unsigned kWide>
__device__ void sum_stretches(const Reduction& of, const Tile& tile, unsigned staged,
                              std::byte* shown) {
  using T = typename Kind::Stored;
  const ShareOf<T, kWide> share{threadIdx.x};
  const int p = of.steps.staging.size, owner = tile.run->owner;
  const T* own = reinterpret_cast<const T*>(tile.run->x) + tile.begin;
  T* y = reinterpret_cast<T*>(tile.run->y) + tile.begin;
  const auto load = [&](int turn, std::uint64_t at, T(&x)[kVectorOf<T>]) {
    const int rank = owner >= turn ? owner - turn : owner - turn + p;
    const T* from = rank == of.steps.staging.rank
                        ? own
                        : reinterpret_cast<const T*>(tile_of(of.steps.staging, rank, staged));
    share.load(from + at, tile.n - at, x);
  };
  typename Kind::Value acc[kVectorOf<T>];
  T x[kVectorOf<T>];
  for (std::uint64_t at = 0; at < tile.n; at += kStretch<T>) {
    const std::uint64_t left = tile.n - at;
    load(0, at, x);
    widen_all<Kind>(x, acc);
#pragma unroll 4
    for (int turn = 1; turn < p; ++turn) {
      load(turn, at, x);
      fold_by<kSums, Kind>(of.op, acc, x);
    }
    if (of.scales) scale_by(of.factor, acc);
    narrow_all<Kind>(acc, x);
    share.store(y + at, left, x);
    if (shown != nullptr) share.store(reinterpret_cast<T*>(shown) + at, left, x);
  }
}
template <typename Kind, bool kSums>
__device__ void sum_tile(const Reduction& of, const Tile& tile, unsigned staged, std::byte* shown) {
  using T = typename Kind::Stored;
  const T* own = reinterpret_cast<const T*>(tile.run->x) + tile.begin;
  const T* y = reinterpret_cast<const T*>(tile.run->y) + tile.begin;
  if (all_aligned(own, y))
    sum_stretches<Kind, kSums, kVectorOf<T>>(of, tile, staged, shown);
  else
    sum_stretches<Kind, kSums, 1>(of, tile, staged, shown);
}

// Takes one tile of any owner.
template <typename Kind, bool kSums>
__device__ bool take_one_shot(const Reduction& of, std::uint32_t step, std::uint64_t& number) {
  using T = typename Kind::Stored;
  const Tile tile = find_tile(of.steps, step);
  const auto staged =
      static_cast<unsigned>(++number % 2 * static_cast<unsigned>(of.steps.staging.size));
  copy_tile(reinterpret_cast<T*>(tile_of(of.steps.staging, of.steps.staging.rank, staged)),
            reinterpret_cast<const T*>(tile.run->x) + tile.begin, tile.n);
  if (!meet(of.steps.staging, number)) return false;
  sum_tile<Kind, kSums>(of, tile, staged, nullptr);
  return true;
}

// Takes a tile of each owner.
template <typename Kind, bool kSums>
__device__ bool take_two_shots(const Reduction& of, std::uint32_t step, std::uint64_t& number) {
  using T = typename Kind::Stored;
  const int rank = of.steps.staging.rank;
  const auto p = static_cast<unsigned>(of.steps.staging.size);
  const auto half = static_cast<unsigned>(++number % 2 * p), sums = 2 * p;
  each_tile(of.steps, step, [&](int owner, const Tile& tile) {
    if (owner == rank) return;
    copy_tile(
        reinterpret_cast<T*>(tile_of(of.steps.staging, rank, half + static_cast<unsigned>(owner))),
        reinterpret_cast<const T*>(tile.run->x) + tile.begin, tile.n);
  });
  if (!meet(of.steps.staging, number)) return false;
  each_tile(of.steps, step, [&](int owner, const Tile& tile) {
    if (owner == rank)
      sum_tile<Kind, kSums>(of, tile, half + static_cast<unsigned>(owner),
                            tile_of(of.steps.staging, rank, sums));
  });
  if (!meet(of.steps.staging, ++number)) return false;
  each_tile(of.steps, step, [&](int owner, const Tile& tile) {
    if (owner == rank) return;
    copy_tile(reinterpret_cast<T*>(tile.run->y) + tile.begin,
              reinterpret_cast<const T*>(tile_of(of.steps.staging, owner, sums)), tile.n);
  });
  return true;
}

// Half of a block's tiles may be written anew once all ranks have come to a later meeting: then
// they are through with what they read after the one before. So one meeting is enough for one shot,
// whose halves take turns.
template <typename Kind, bool kSums>
__global__ void __launch_bounds__(kStagedThreads)
    reduce_kernel(const __grid_constant__ Reduction of) {
  std::uint64_t number = head_of(of.steps.staging, of.steps.staging.rank).met[blockIdx.x];
  if (is_over(of.steps.staging)) return;
  for (std::uint32_t step = blockIdx.x; step < of.steps.count; step += gridDim.x)
    if (!(of.steps.one_shot ? take_one_shot<Kind, kSums>(of, step, number)
                            : take_two_shots<Kind, kSums>(of, step, number)))
      return;
}

Status reduce_staged(const Staging& staging, int dtype, int op, const SummedRun* runs, int count,
                     int divisor, bool one_shot, Stream stream) {
  if (divisor < 1) return cudaErrorInvalidValue;
  Reduction of{{}, static_cast<ReduceOp>(op), divisor != 1, 1.0 / divisor};
  of.steps.staging = staging;
  of.steps.one_shot = one_shot;
  const Folding folding{static_cast<DType>(dtype), of.op, of.scales};
  return start_any(folding, [&]<typename Kind, bool kSums>(ReduceOp its, unsigned each) {
    of.op = its;
    constexpr Stretches stretches{kStretch<typename Kind::Stored>, kMostVectors};
    return in_steps(of.steps, runs, count, each, stretches, [&](const Steps& steps) {
      of.steps = steps;
      return launch_waiting(reduce_kernel<Kind, kSums>, steps.blocks(), kStagedThreads, stream, of);
    });
  });
}

}  // namespace

void fill_reduce(Api& api) { api.reduce_staged = reduce_staged; }

}  // namespace gradwire::cuda
