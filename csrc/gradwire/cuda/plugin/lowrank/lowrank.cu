// lowrank: the three passes over a matrix (codec/factors.h), each of which reads it once. Factors
// are handled four at a time; missing ones count as zeros. A kernel works on many matrices of one
// rank.
#include "gradwire/codec/factors.h"

#include <type_traits>

#include "gradwire/cuda/plugin/batch.cuh"
#include "gradwire/cuda/plugin/floats.cuh"
#include "gradwire/cuda/plugin/functions.h"
#include "gradwire/cuda/plugin/gpu.cuh"
#include "gradwire/cuda/plugin/span_feedback.cuh"

namespace gradwire::cuda {
namespace {

using codec::Factors;
using codec::kMostRank;

template <unsigned kValue>
using FactorCount = std::integral_constant<unsigned, kValue>;

// Calls body(FactorCount<k>{}) with the least k of 4, 8, 16 and 32 that is enough for the rank.
template <typename Body>
Status with_factors(std::uint64_t rank, Body body) {
  if (rank <= 4) return body(FactorCount<4>{});
  if (rank <= 8) return body(FactorCount<8>{});
  if (rank <= 16) return body(FactorCount<16>{});
  return body(FactorCount<32>{});
}

// Returns element `at` of vectors k to k + 3, which have n elements each; 0 where there is none.
__device__ Four load_four(const float* vectors, std::uint64_t k, std::uint64_t rank,
                          std::uint64_t at, std::uint64_t n) {
  Four four;
#pragma unroll
  for (unsigned f = 0; f < 4; ++f)
    four.value[f] = k + f < rank && at < n ? vectors[(k + f) * n + at] : 0;
  return four;
}

// ---- p = v·q: sums along rows ------------------------------------------------------------------
// A row has 16 lanes, each with its own thread, which has a sum for each factor. A block loads q
// tile by tile for all of its rows.

constexpr unsigned kRowLanes = 16;
constexpr unsigned kLeftThreads = 512, kFewThreads = 128;
constexpr std::uint64_t kManyRows = 4096;  // from which on large blocks fill the device

template <unsigned kFactors>
struct LeftTile {
  static constexpr unsigned kColumns = 256;
  static constexpr unsigned kSteps = kColumns / kRowLanes;
  Four q[kFactors / 4][kColumns];
};

// Reads x or x + e; the latter is also written to v.
struct LeftSource {
  const float* x;
  const float* residual;
  float* v;

  __device__ float take(std::uint64_t at) const {
    if (residual == nullptr) return x[at];
    return canonical(x[at] + residual[at]);
  }
};

// Loads the thread's values in a tile of its row, the first of them at `at`; the row has `left`
// elements from there on. Where there is a residual, they are written to v too.
template <unsigned kSteps>
__device__ void load_row(LeftSource from, std::uint64_t at, std::uint64_t left,
                         float (&values)[kSteps]) {
#pragma unroll
  for (unsigned s = 0; s < kSteps; ++s)
    values[s] = s * kRowLanes < left ? from.take(at + s * kRowLanes) : 0;
  if (from.residual == nullptr) return;
#pragma unroll
  for (unsigned s = 0; s < kSteps; ++s)
    if (s * kRowLanes < left) from.v[at + s * kRowLanes] = values[s];
}

template <unsigned kFactors>
__device__ void stage(LeftTile<kFactors>& tile, const float* q, std::uint64_t first, Factors of) {
  constexpr unsigned kColumns = LeftTile<kFactors>::kColumns;
  for (unsigned i = threadIdx.x; i < kColumns * (kFactors / 4); i += blockDim.x)
    tile.q[i / kColumns][i % kColumns] =
        load_four(q, i / kColumns * 4, of.rank, first + i % kColumns, of.columns);
}

template <unsigned kFactors, unsigned kSteps>
__device__ void add_row(const LeftTile<kFactors>& tile, unsigned lane,
                        const float (&values)[kSteps], float (&sums)[kFactors]) {
#pragma unroll
  for (unsigned s = 0; s < kSteps; ++s)
#pragma unroll
    for (unsigned k = 0; k < kFactors; k += 4) {
      const Four q = tile.q[k / 4][s * kRowLanes + lane];
#pragma unroll
      for (unsigned f = 0; f < 4; ++f) sums[k + f] += values[s] * q.value[f];
    }
}

// Joins the lanes: lane l adds lane l + w, for w = 8, 4, 2, 1. The first lane writes the sums.
template <unsigned kFactors>
__device__ void write_row(float (&sums)[kFactors], float* p, std::uint64_t row, bool writes,
                          Factors of) {
#pragma unroll
  for (unsigned k = 0; k < kFactors; ++k) {
    float sum = sums[k];
#pragma unroll
    for (unsigned w = kRowLanes / 2; w > 0; w /= 2) sum += __shfl_down_sync(kAllLanes, sum, w);
    if (writes && k < of.rank) p[k * of.rows + row] = sum;
  }
}

template <unsigned kFactors>
__global__ void __launch_bounds__(kLeftThreads, kFactors <= 16 ? 2 : 1)
    left(const __grid_constant__ Batch<GpuMatrix> all) {
  using Tile = LeftTile<kFactors>;
  __shared__ Tile tile;
  const unsigned lane = threadIdx.x % kRowLanes, rows = blockDim.x / kRowLanes;
  all.each_tile([&](cuda::Tile<GpuMatrix> own) {
    const GpuMatrix& its = own.span;
    const Factors& of = its.of;
    const LeftSource from{its.x, residual_of(its.span_feedback), its.y};
    const std::uint64_t row = own.number * rows + threadIdx.x / kRowLanes;
    float sums[kFactors] = {};
    for (std::uint64_t j = 0; j < of.columns; j += Tile::kColumns) {
      const bool any = row < of.rows && j + lane < of.columns;
      float values[Tile::kSteps];
      load_row(from, row * of.columns + j + lane, any ? of.columns - j - lane : 0, values);
      __syncthreads();  // nobody reads the last tile any more
      stage(tile, its.q, j, of);
      __syncthreads();
      add_row(tile, lane, values, sums);
    }
    write_row(sums, its.p, row, row < of.rows && lane == 0, of);
  });
}

Status left_factor(const GpuMatrix* all, int count, Stream stream) {
  std::uint64_t rows = 0;
  for (int i = 0; i < count; ++i) rows += all[i].of.rows;
  const unsigned threads = rows < kManyRows ? kFewThreads : kLeftThreads;
  const auto tiles = [threads](const GpuMatrix& each) {
    return blocks_for(each.of.rows, threads / kRowLanes);
  };
  return in_batches(all, count, tiles, [&](const Batch<GpuMatrix>& batch) {
    return with_factors(batch.at[0].of.rank, [&](auto factors) {
      return launch(left<decltype(factors)::value>, batch.tiles(), threads, stream, batch);
    });
  });
}

// ---- q = vᵀ·p: sums along columns --------------------------------------------------------------
// A block has a strip of columns, from the first row to the last, and up to 16 factors. A tile has
// as many groups of eight rows as there are threads for them; each thread sums one group of one
// column. These sums are added to those of the columns group by group, four factors at a time,
// which takes one barrier: the sums have two places, taken in turn, so that the next ones are
// written while these are read; or one, with another barrier. What a tile needs of p is loaded one
// tile ahead, and stored where a barrier follows before it is read.

constexpr unsigned kGroup = 8;  // rows
constexpr unsigned kRightThreads = 512;
constexpr unsigned kMostAtOnce = 16;  // factors

template <unsigned kFactors, unsigned kWide>
struct RightTile {
  static constexpr unsigned kGroups = kRightThreads / kWide;
  static constexpr unsigned kRows = kGroups * kGroup;
  // With four factors there is one barrier a tile, so the next tile's values need another place.
  static constexpr unsigned kPlaces = kFactors == 4 ? 2 : 1;
  // The sums have two places where a kernel's 48 KB of shared memory have room for them.
  static constexpr unsigned kTurns = kFactors == 16 && kWide == 8 ? 1 : 2;
  // Values of p times kHeadroom. The padding of one per group puts a warp's groups into different
  // banks.
  Four picked[kPlaces][kFactors / 4][kGroups][kGroup + 1];
  float sums[kTurns][4][kRightThreads + kWide];  // padded likewise, for the four factors
};

// A thread's part of what a tile needs of p.
template <unsigned kFactors, unsigned kWide>
class Picked {
 public:
  __device__ void load(const float* p, std::uint64_t first_factor, std::uint64_t first,
                       Factors of) {
#pragma unroll
    for (unsigned k = 0; k < kEach; ++k) {
      const unsigned i = threadIdx.x + k * kRightThreads, row = i % kRows;
      if (i < kAll)
        own_[k] = load_four(p, first_factor + i / kRows * 4, of.rank, first + row, of.rows);
    }
  }
  __device__ void store(RightTile<kFactors, kWide>& tile, unsigned place) const {
#pragma unroll
    for (unsigned k = 0; k < kEach; ++k) {
      const unsigned i = threadIdx.x + k * kRightThreads, row = i % kRows;
      if (i >= kAll) continue;
      Four four = own_[k];
#pragma unroll
      for (float& each : four.value) each *= codec::kHeadroom;
      tile.picked[place][i / kRows][row / kGroup][row % kGroup] = four;
    }
  }

 private:
  static constexpr unsigned kRows = RightTile<kFactors, kWide>::kRows;
  static constexpr unsigned kAll = kRows * (kFactors / 4);
  static constexpr unsigned kEach = (kAll + kRightThreads - 1) / kRightThreads;
  Four own_[kEach] = {};
};

// Loads a group: eight rows of one column, 0 beyond the matrix.
__device__ void load_group(const float* v, std::uint64_t row, std::uint64_t column, Factors of,
                           float (&values)[kGroup]) {
#pragma unroll
  for (unsigned r = 0; r < kGroup; ++r)
    values[r] = row + r < of.rows && column < of.columns ? v[(row + r) * of.columns + column] : 0;
}

template <unsigned kFactors, unsigned kWide>
__device__ void sum_group(const RightTile<kFactors, kWide>& tile, unsigned place, unsigned group,
                          const float (&values)[kGroup], float (&sums)[kFactors]) {
#pragma unroll
  for (unsigned r = 0; r < kGroup; ++r)
#pragma unroll
    for (unsigned k = 0; k < kFactors; k += 4) {
      const Four factor = tile.picked[place][k / 4][group][r];
#pragma unroll
      for (unsigned f = 0; f < 4; ++f) sums[k + f] += values[r] * factor.value[f];
    }
}

// Adds the sums of all groups to whole[] of the first 4 · kWide threads: whole[i] of thread t is of
// column t % kWide and of factor 4 i + t / kWide. Calls stored() where nobody reads the only place
// of p's values any more; a barrier follows. `turn` is the place of the sums.
template <unsigned kFactors, unsigned kWide, typename Stored>
__device__ void join(RightTile<kFactors, kWide>& tile, const float (&sums)[kFactors],
                     float (&whole)[kFactors / 4], unsigned& turn, Stored stored) {
#pragma unroll
  for (unsigned k = 0; k < kFactors; k += 4) {
#pragma unroll
    for (unsigned f = 0; f < 4; ++f) tile.sums[turn][f][threadIdx.x] = sums[k + f];
    __syncthreads();
    if (k == 0) stored();
    if (threadIdx.x < 4 * kWide) {
      const float* found = tile.sums[turn][threadIdx.x / kWide] + threadIdx.x % kWide;
#pragma unroll 8
      for (unsigned group = 0; group < RightTile<kFactors, kWide>::kGroups; ++group)
        whole[k / 4] += found[group * kWide];
    }
    if constexpr (RightTile<kFactors, kWide>::kTurns == 2)
      turn ^= 1;
    else
      __syncthreads();
  }
}

template <unsigned kFactors, unsigned kWide>
__device__ void write_columns(const float (&whole)[kFactors / 4], float* q,
                              std::uint64_t first_factor, std::uint64_t first, Factors of) {
  const std::uint64_t column = first + threadIdx.x % kWide;
  if (threadIdx.x >= 4 * kWide || column >= of.columns) return;
#pragma unroll
  for (unsigned four = 0; four < kFactors / 4; ++four) {
    const std::uint64_t k = first_factor + 4 * four + threadIdx.x / kWide;
    if (k < of.rank) q[k * of.columns + column] = whole[four];
  }
}

// Adds up a strip of columns for up to kFactors factors.
template <unsigned kFactors, unsigned kWide>
__device__ void sum_strip(RightTile<kFactors, kWide>& tile, const GpuMatrix& its,
                          std::uint64_t first, std::uint64_t factor, unsigned& turn) {
  const Factors& of = its.of;
  const float* const v = keeps_errors(its.span_feedback) ? its.y : its.x;
  using Tile = RightTile<kFactors, kWide>;
  const unsigned group = threadIdx.x / kWide;
  const std::uint64_t column = first + threadIdx.x % kWide;
  float whole[kFactors / 4] = {};
  float next[kGroup];
  Picked<kFactors, kWide> picked;
  load_group(v, group * kGroup, column, of, next);
  picked.load(its.p, factor, 0, of);
  picked.store(tile, 0);
  __syncthreads();
  unsigned place = 0;
  for (std::uint64_t i = 0; i < of.rows; i += Tile::kRows) {
    float values[kGroup], sums[kFactors] = {};
#pragma unroll
    for (unsigned r = 0; r < kGroup; ++r) values[r] = next[r];
    load_group(v, i + Tile::kRows + group * kGroup, column, of, next);
    picked.load(its.p, factor, i + Tile::kRows, of);
    sum_group(tile, place, group, values, sums);
    if constexpr (Tile::kPlaces == 2) picked.store(tile, place ^= 1);
    join(tile, sums, whole, turn, [&] {
      if constexpr (Tile::kPlaces == 1) picked.store(tile, 0);
    });
  }
  write_columns<kFactors, kWide>(whole, its.own_q, factor, first, of);
}

// Consecutive blocks take the factors of one strip, then those of the next strip.
template <unsigned kFactors, unsigned kWide>
__global__ void __launch_bounds__(kRightThreads, kFactors <= 8 ? 2 : 1)
    right(const __grid_constant__ Batch<GpuMatrix> all) {
  __shared__ RightTile<kFactors, kWide> tile;
  unsigned turn = 0;
  all.each_tile([&](Tile<GpuMatrix> own) {
    const std::uint64_t parts = blocks_for(own.span.of.rank, kFactors);
    sum_strip(tile, own.span, own.number / parts * kWide, own.number % parts * kFactors, turn);
  });
}

template <unsigned kFactors, unsigned kWide>
Status right_of(const GpuMatrix* all, int count, Stream stream) {
  const auto tiles = [](const GpuMatrix& each) {
    return blocks_for(each.of.columns, kWide) * blocks_for(each.of.rank, kFactors);
  };
  return in_batches(all, count, tiles, [&](const Batch<GpuMatrix>& batch) {
    return launch(right<kFactors, kWide>, batch.tiles(), kRightThreads, stream, batch);
  });
}

// Chooses the width of strips: narrow, so that there are enough of them, but not below 8 floats,
// since memory is read in lines.
Status right_factor(const GpuMatrix* all, int count, Stream stream) {
  if (count == 0) return 0;
  std::uint64_t columns = 0;
  for (int i = 0; i < count; ++i) columns += all[i].of.columns;
  const std::uint64_t at_once = all[0].of.rank < kMostAtOnce ? all[0].of.rank : kMostAtOnce;
  return with_factors(at_once, [&](auto factors) {
    constexpr unsigned kFactors =
        decltype(factors)::value < kMostAtOnce ? decltype(factors)::value : kMostAtOnce;
    if (columns >= 8192) return right_of<kFactors, 32>(all, count, stream);
    return columns >= 4096 ? right_of<kFactors, 16>(all, count, stream)
                           : right_of<kFactors, 8>(all, count, stream);
  });
}

// ---- y = p·qᵀ ----------------------------------------------------------------------------------
// A thread keeps its column of q in registers while it goes down the rows of a tile.

constexpr unsigned kProductThreads = 256;
constexpr unsigned kProductWide = kWarp;
constexpr unsigned kProductDeep = 8;  // rows of a thread
constexpr unsigned kProductRows = kProductThreads / kProductWide * kProductDeep;

__device__ float limit(float x) {
  constexpr float kMost = 0x1.FFFFFEp127F;
  const float below = x < kMost ? x : kMost;
  return below > -kMost ? below : -kMost;
}

template <unsigned kFactors>
struct ProductTile {
  Four p[kFactors / 4][kProductRows];
};

template <unsigned kFactors>
__device__ void stage(ProductTile<kFactors>& tile, const float* p, std::uint64_t first,
                      Factors of) {
  for (unsigned i = threadIdx.x; i < kProductRows * (kFactors / 4); i += kProductThreads)
    tile.p[i / kProductRows][i % kProductRows] =
        load_four(p, i / kProductRows * 4, of.rank, first + i % kProductRows, of.rows);
}

template <unsigned kFactors>
__device__ void load_column(const float* q, std::uint64_t column, Factors of,
                            Four (&found)[kFactors / 4]) {
#pragma unroll
  for (unsigned k = 0; k < kFactors; k += 4)
    found[k / 4] = load_four(q, k, of.rank, column, of.columns);
}

template <unsigned kFactors>
__device__ float product_at(const ProductTile<kFactors>& tile, unsigned row,
                            const Four (&q)[kFactors / 4]) {
  float sum = 0;
#pragma unroll
  for (unsigned k = 0; k < kFactors / 4; ++k) {
    const Four p = tile.p[k][row];
#pragma unroll
    for (unsigned f = 0; f < 4; ++f) sum += q[k].value[f] * p.value[f];
  }
  return sum;
}

// Calls body(r, row of the tile, index in the matrix) for each of the thread's rows of a tile.
template <typename Body>
__device__ void each_row(std::uint64_t first, std::uint64_t column, Factors of, Body body) {
  if (column >= of.columns) return;
#pragma unroll
  for (unsigned r = 0; r < kProductDeep; ++r) {
    const unsigned row = threadIdx.x / kProductWide + r * (kProductThreads / kProductWide);
    if (first + row < of.rows) body(r, row, (first + row) * of.columns + column);
  }
}

template <unsigned kFactors, bool kError>
__global__ void __launch_bounds__(kProductThreads)
    product(const __grid_constant__ Batch<GpuMatrix> all, float factor) {
  __shared__ ProductTile<kFactors> tile;
  all.each_tile([&](Tile<GpuMatrix> own) {
    const GpuMatrix& its = own.span;
    const Factors& of = its.of;
    const std::uint64_t across = blocks_for(of.columns, kProductWide);
    const std::uint64_t first = own.number / across * kProductRows;
    const std::uint64_t column = own.number % across * kProductWide + threadIdx.x % kProductWide;
    const float scale = factor * its.scales[0];
    Four factors[kFactors / 4];
    float values[kProductDeep];
    if constexpr (kError)
      each_row(first, column, of,
               [&](unsigned r, unsigned, std::uint64_t at) { values[r] = its.y[at]; });
    __syncthreads();  // nobody reads the last tile any more
    stage(tile, its.p, first, of);
    __syncthreads();
    if constexpr (kError) {
      const float own_scale = its.scales[1];
      float* error = next_residual(its.span_feedback);
      load_column<kFactors>(its.own_q, column, of, factors);
      each_row(first, column, of, [&](unsigned r, unsigned row, std::uint64_t at) {
        error[at] = limit(values[r] - limit(product_at(tile, row, factors) * own_scale));
      });
    }
    load_column<kFactors>(its.q, column, of, factors);
    each_row(first, column, of, [&](unsigned, unsigned row, std::uint64_t at) {
      its.y[at] = limit(product_at(tile, row, factors) * scale);
    });
  });
}

Status product_of(const GpuMatrix* all, int count, float factor, Stream stream) {
  const auto tiles = [](const GpuMatrix& each) {
    return blocks_for(each.of.rows, kProductRows) * blocks_for(each.of.columns, kProductWide);
  };
  return in_batches(all, count, tiles, [&](const Batch<GpuMatrix>& batch) {
    return with_factors(batch.at[0].of.rank, [&](auto factors) {
      constexpr unsigned kFactors = decltype(factors)::value;
      return launch(keeps_errors(batch.at[0].span_feedback) ? product<kFactors, true>
                                                            : product<kFactors, false>,
                    batch.tiles(), kProductThreads, stream, batch, factor);
    });
  });
}

}  // namespace

void fill_lowrank(Api& api) {
  api.left_factor = left_factor;
  api.right_factor = right_factor;
  api.product = product_of;
}

}  // namespace gradwire::cuda
