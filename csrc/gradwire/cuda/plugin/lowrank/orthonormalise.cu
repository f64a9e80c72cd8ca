// lowrank: Gram-Schmidt (codec/lowrank.h) on the columns of a factor. Column k subtracts its
// projections on the columns before it, in their order; so all later columns may subtract their
// projections on column m as soon as that is done. One launch does so for one m, with a block for
// each later column of each matrix; the first of these blocks also finishes its column.
//
// A sum has 16 lanes. One thread adds up each lane in order, from terms that the other threads
// prepare meanwhile.
#include "gradwire/cuda/plugin/batch.cuh"
#include "gradwire/cuda/plugin/functions.h"
#include "gradwire/cuda/plugin/gpu.cuh"

namespace gradwire::cuda {
namespace {

constexpr unsigned kThreads = 1024;
constexpr unsigned kLanes = 16;
constexpr unsigned kTile = kThreads - kWarp;  // elements: one per preparing thread
constexpr double kVanished = 0x1p-60;
constexpr std::uint64_t kNone = ~std::uint64_t{0};
static_assert(kTile % kLanes == 0);

// The two operands of one element, and the terms of both sums that they give.
struct Operands {
  double a, b;
};
struct Terms {
  double term[2];
};

struct SumRoom {
  double terms[2][2][kTile];  // [buffer][sum]: while one tile is added up, the next is prepared
  double sums[2];
};

// A preparing thread: it handles its element of each tile in turn, and loads one tile ahead.
template <typename Load, typename Multiply>
class Preparer {
 public:
  __device__ Preparer(SumRoom& room, std::uint64_t n, Load load, Multiply multiply)
      : room_(room), n_(n), load_(load), multiply_(multiply), at_(threadIdx.x - kWarp) {
    fetch();
  }

  __device__ void next(unsigned buffer) {
    if (at_ < n_) {
      const Terms terms = multiply_(fetched_);
      room_.terms[buffer][0][threadIdx.x - kWarp] = terms.term[0];
      room_.terms[buffer][1][threadIdx.x - kWarp] = terms.term[1];
    }
    at_ += kTile;
    fetch();
  }

 private:
  __device__ void fetch() {
    if (threadIdx.x >= kWarp && at_ < n_) fetched_ = load_(at_);
  }

  SumRoom& room_;
  std::uint64_t n_;
  Load load_;
  Multiply multiply_;
  std::uint64_t at_;
  Operands fetched_{};
};

__device__ double add_up(double lane, const double* terms, std::uint64_t left) {
  const unsigned count = left < kTile ? static_cast<unsigned>(left) : kTile;
#pragma unroll 8
  for (unsigned i = threadIdx.x % kLanes; i < count; i += kLanes) lane += terms[i];
  return lane;
}

// Computes both sums into room.sums. The first warp adds up, half of its lanes for each sum.
template <typename Load, typename Multiply>
__device__ void sum_up(SumRoom& room, std::uint64_t n, Load load, Multiply multiply) {
  const bool adds = threadIdx.x < kWarp;
  const std::uint64_t tiles = blocks_for(n, kTile);
  Preparer preparer(room, n, load, multiply);
  double lane = 0;
  for (std::uint64_t tile = 0; tile <= tiles; ++tile) {
    if (!adds)
      preparer.next(tile % 2);
    else if (tile > 0)
      lane = add_up(lane, room.terms[(tile - 1) % 2][threadIdx.x / kLanes], n - (tile - 1) * kTile);
    __syncthreads();
  }
  if (adds) {
    // Lane l adds lane l + w.
    for (unsigned w = kLanes / 2; w > 0; w /= 2) lane += __shfl_down_sync(kAllLanes, lane, w);
    if (threadIdx.x % kLanes == 0) room.sums[threadIdx.x / kLanes] = lane;
  }
  __syncthreads();
}

// Subtracts the projection on `done` from the column.
__device__ void take_off(SumRoom& room, const double* __restrict__ done,
                         double* __restrict__ column, std::uint64_t n) {
  sum_up(
      room, n, [=](std::uint64_t i) { return Operands{done[i], column[i]}; },
      [](Operands each) { return Terms{{each.a * each.b, 0}}; });
  const double times = room.sums[0];
#pragma unroll 4
  for (std::uint64_t i = threadIdx.x; i < n; i += kThreads) column[i] -= times * done[i];
  __syncthreads();
}

// Normalises a column, or makes it 0 where hardly anything is left of it. p still holds the column
// as it was at first, and gets the result.
__device__ void finish(SumRoom& room, float* __restrict__ p, double* __restrict__ column,
                       std::uint64_t n) {
  sum_up(
      room, n, [=](std::uint64_t i) { return Operands{static_cast<double>(p[i]), column[i]}; },
      [](Operands each) { return Terms{{each.a * each.a, each.b * each.b}}; });
  const double before = room.sums[0], after = room.sums[1];
  const double factor = after > before * kVanished ? __ddiv_rn(1, __dsqrt_rn(after)) : 0;
#pragma unroll 4
  for (std::uint64_t i = threadIdx.x; i < n; i += kThreads) {
    const double value = column[i] * factor;
    column[i] = value;
    p[i] = static_cast<float>(value);
  }
}

// Continues after column `done` is finished; kNone: no column is yet.
__global__ void __launch_bounds__(kThreads)
    orthonormalise_after(std::uint64_t done, const __grid_constant__ Batch<GpuMatrix> all) {
  __shared__ SumRoom shared;
  all.each_tile([&](Tile<GpuMatrix> tile) {
    const GpuMatrix& its = tile.span;
    const std::uint64_t k = done + 1 + tile.number, rows = its.of.rows;
    double* column = its.room + k * rows;
    if (done == kNone) {
      for (std::uint64_t i = threadIdx.x; i < rows; i += kThreads) column[i] = its.p[k * rows + i];
      __syncthreads();
    } else {
      take_off(shared, its.room + done * rows, column, rows);
    }
    if (k == done + 1) finish(shared, its.p + k * rows, column, rows);
  });
}

Status orthonormalise(const GpuMatrix* all, int count, Stream stream) {
  const std::uint64_t rank = count == 0 ? 0 : all[0].of.rank;
  Status status = 0;
  for (std::uint64_t k = 0; k < rank && status == 0; ++k)
    status = in_batches(
        all, count, [=](const GpuMatrix& each) { return each.of.rows == 0 ? 0 : rank - k; },
        [=](const Batch<GpuMatrix>& batch) {
          return launch(orthonormalise_after, batch.tiles(), kThreads, stream,
                        k == 0 ? kNone : k - 1, batch);
        });
  return status;
}

}  // namespace

void fill_orthonormalise(Api& api) { api.orthonormalise = orthonormalise; }

}  // namespace gradwire::cuda
