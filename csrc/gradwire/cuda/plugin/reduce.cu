// An all_reduce as one kernel over staging, with the additions of the schedule `direct`. The same
// block of all ranks takes the same tiles, and waits for no other.
//
//   one shot:   x -> own staging | meet | sum of all ranks' staging -> y
//   two shots:  x -> own staging | meet | sum of the own part -> y, own staging | meet | others ->
//   y
#include "gradwire/cuda/plugin/batch.cuh"
#include "gradwire/cuda/plugin/fold.cuh"
#include "gradwire/cuda/plugin/functions.h"
#include "gradwire/cuda/plugin/staging.cuh"

namespace gradwire::cuda {
namespace {

struct Reduction {
  Staging staging;
  Batch<SummedRun> runs;
  std::uint32_t first[kMostMapped + 1];  // tiles before those of each owner, and all
  std::uint32_t steps;
  std::uint32_t tile;  // elements
  bool one_shot;
  ReduceOp op;
  bool scales;
  Scaling scaling;
};

// A tile of a run: elements [begin, begin + n).
struct Tile {
  const SummedRun* run;
  std::uint64_t begin;
  std::uint64_t n;
};

// How the threads of a block share a stretch of a tile.
template <typename T>
constexpr unsigned kVectorOf = kVector / sizeof(T);
template <typename T, unsigned kWide>
using ShareOf = Share<kStagedThreads, kVectorOf<T>, kWide>;
template <typename T>
constexpr std::uint32_t kStretch = kStagedThreads * kVectorOf<T>;

__device__ Tile find_tile(const Reduction& of, std::uint32_t number) {
  const unsigned r = of.runs.find(number);
  const SummedRun& run = of.runs.at[r];
  const std::uint64_t begin = std::uint64_t{number - of.runs.first[r]} * of.tile;
  const std::uint64_t left = run.n - begin;
  return {&run, begin, left < of.tile ? left : of.tile};
}

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
  const int p = of.staging.size, owner = tile.run->owner;
  const T* own = reinterpret_cast<const T*>(tile.run->x) + tile.begin;
  T* y = reinterpret_cast<T*>(tile.run->y) + tile.begin;
  const auto load = [&](int turn, std::uint64_t at, T(&x)[kVectorOf<T>]) {
    const int rank = owner >= turn ? owner - turn : owner - turn + p;
    const T* from = rank == of.staging.rank
                        ? own
                        : reinterpret_cast<const T*>(tile_of(of.staging, rank, staged));
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
    if (of.scales) scale_by(of.scaling, acc);
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
  const Tile tile = find_tile(of, step);
  const auto staged = static_cast<unsigned>(++number % 2 * static_cast<unsigned>(of.staging.size));
  copy_tile(reinterpret_cast<T*>(tile_of(of.staging, of.staging.rank, staged)),
            reinterpret_cast<const T*>(tile.run->x) + tile.begin, tile.n);
  if (!meet(of.staging, number)) return false;
  sum_tile<Kind, kSums>(of, tile, staged, nullptr);
  return true;
}

// Calls each(owner, tile) for the tile of each owner that this step has.
template <typename Each>
__device__ void each_tile(const Reduction& of, std::uint32_t step, Each each) {
  for (int owner = 0; owner < of.staging.size; ++owner)
    if (of.first[owner] + step < of.first[owner + 1])
      each(owner, find_tile(of, of.first[owner] + step));
}

// Takes a tile of each owner.
template <typename Kind, bool kSums>
__device__ bool take_two_shots(const Reduction& of, std::uint32_t step, std::uint64_t& number) {
  using T = typename Kind::Stored;
  const int rank = of.staging.rank;
  const auto p = static_cast<unsigned>(of.staging.size);
  const auto half = static_cast<unsigned>(++number % 2 * p), sums = 2 * p;
  each_tile(of, step, [&](int owner, const Tile& tile) {
    if (owner == rank) return;
    copy_tile(reinterpret_cast<T*>(tile_of(of.staging, rank, half + static_cast<unsigned>(owner))),
              reinterpret_cast<const T*>(tile.run->x) + tile.begin, tile.n);
  });
  if (!meet(of.staging, number)) return false;
  each_tile(of, step, [&](int owner, const Tile& tile) {
    if (owner == rank)
      sum_tile<Kind, kSums>(of, tile, half + static_cast<unsigned>(owner),
                            tile_of(of.staging, rank, sums));
  });
  if (!meet(of.staging, ++number)) return false;
  each_tile(of, step, [&](int owner, const Tile& tile) {
    if (owner == rank) return;
    copy_tile(reinterpret_cast<T*>(tile.run->y) + tile.begin,
              reinterpret_cast<const T*>(tile_of(of.staging, owner, sums)), tile.n);
  });
  return true;
}

// Half of a block's tiles may be written anew once all ranks have come to a later meeting: then
// they are through with what they read after the one before. So one meeting is enough for one shot,
// whose halves take turns.
template <typename Kind, bool kSums>
__global__ void __launch_bounds__(kStagedThreads)
    reduce_kernel(const __grid_constant__ Reduction of) {
  std::uint64_t number = head_of(of.staging, of.staging.rank).met[blockIdx.x];
  __syncthreads();  // all threads have read it
  for (std::uint32_t step = blockIdx.x; step < of.steps; step += gridDim.x)
    if (!(of.one_shot ? take_one_shot<Kind, kSums>(of, step, number)
                      : take_two_shots<Kind, kSums>(of, step, number)))
      return;
}

// Returns the elements of a tile: few enough that all blocks have some, if there are so many.
std::uint32_t tile_for(const SummedRun* runs, int count, const Reduction& of, unsigned each,
                       std::uint32_t stretch) {
  std::uint64_t elements = 0;
  for (int i = 0; i < count; ++i) elements += runs[i].n * each;
  const std::uint64_t owners = of.one_shot ? 1 : static_cast<std::uint64_t>(of.staging.size);
  const std::uint64_t vectors = blocks_for(elements, owners * kMeetingBlocks * stretch);
  return stretch * static_cast<std::uint32_t>(vectors < kMostVectors ? vectors : kMostVectors);
}

template <typename Kind, bool kSums>
Status start(Reduction of, const SummedRun* runs, int count, unsigned each, Stream stream) {
  of.tile = tile_for(runs, count, of, each, kStretch<typename Kind::Stored>);
  const auto in_elements = [each](SummedRun run) {
    run.n *= each;
    return run;
  };
  return in_batches(
      runs, count, in_elements,
      [&](const SummedRun& run) { return blocks_for(run.n * each, of.tile); },
      [&](const Batch<SummedRun>& batch) {
        of.runs = batch;
        of.steps = 0;
        unsigned r = 0;
        for (int owner = 0; owner < of.staging.size; ++owner) {
          of.first[owner] = batch.first[r];
          while (r < batch.count && batch.at[r].owner == owner) ++r;
          of.first[owner + 1] = batch.first[r];
          const std::uint32_t tiles = of.first[owner + 1] - of.first[owner];
          of.steps = of.one_shot ? of.steps + tiles : tiles > of.steps ? tiles : of.steps;
        }
        const unsigned blocks = of.steps < kMeetingBlocks ? of.steps : kMeetingBlocks;
        return launch_waiting(reduce_kernel<Kind, kSums>, blocks, kStagedThreads, stream, of);
      });
}

Status reduce_staged(const Staging& staging, int dtype, int op, const SummedRun* runs, int count,
                     int divisor, bool one_shot, Stream stream) {
  if (divisor < 1) return cudaErrorInvalidValue;
  Reduction of{};
  of.staging = staging;
  of.one_shot = one_shot;
  of.op = static_cast<ReduceOp>(op);
  of.scales = divisor != 1;
  of.scaling = {1.0 / divisor, divisor};
  const Folding folding{static_cast<DType>(dtype), of.op, true, of.scales};
  return start_any(folding, [&]<typename Kind, bool kSums>(ReduceOp its, unsigned each) {
    of.op = its;
    return start<Kind, kSums>(of, runs, count, each, stream);
  });
}

}  // namespace

void fill_reduce(Api& api) { api.reduce_staged = reduce_staged; }

}  // namespace gradwire::cuda
