// lowrank: the three passes over a matrix (codec/factors.h). Tiles of rows, columns and factors
// stay in registers and in the L1 cache; they do not change the order of any sum.
#pragma once

#include "gradwire/codec/factors.h"
#include "gradwire/codec/simd/simd_sweep.h"

namespace gradwire::codec {
namespace {
namespace lowrank {

// The lanes of a sum along a row: element j is added to lane j mod 16.
constexpr std::size_t kRowLanes = 16;
constexpr std::size_t kRowParts = kRowLanes / kLanes;
// Elements of a row that are read before the next factors use them: a few KiB, for the L1 cache.
constexpr std::size_t kRowBlock = 512;
// Rows whose products are summed before they join the sum along a column.
constexpr std::size_t kColumnBlock = 8;
// Tiles that fill the 16 registers of AVX2 or the 32 of AVX-512: kLeftTile rows by kLeftTile
// factors for the left factor, elsewhere kTile rows or factors by kVectors vectors of columns.
constexpr std::size_t kLeftTile = kLanes == 16 ? 4 : kLanes == 8 ? 2 : 1;
constexpr std::size_t kTile = kLanes == 1 ? 1 : 4;
constexpr std::size_t kVectors = kLeftTile;

template <std::size_t N>
struct Count {
  static constexpr std::size_t value = N;
};

// Calls body(first, Count<k>) over [0, n), with k = kMost as long as possible, then with k = 1.
template <std::size_t kMost, typename Body>
void tiles(std::size_t n, Body body) {
  std::size_t i = 0;
  for (; i + kMost <= n; i += kMost) body(i, Count<kMost>{});
  for (; i < n; ++i) body(i, Count<1>{});
}

F32 splat(float x) { return bits<F32>(U32{} | bits<std::uint32_t>(x)); }

float tree_sum(const float (&lanes)[kRowLanes]) {
  F32 parts[kRowParts];
  for (std::size_t part = 0; part < kRowParts; ++part)
    parts[part] = load<Floats>(lanes, part * kLanes, All{});
  for (std::size_t width = kRowParts / 2; width > 0; width /= 2)
    for (std::size_t part = 0; part < width; ++part) parts[part] += parts[part + width];
  const F32 sum = fold<1>(fold<2>(fold<4>(fold<8>(parts[0]))));
  float first;
  __builtin_memcpy(&first, &sum, sizeof first);
  return first;
}

// ---- p = v·q: sums along rows ------------------------------------------------------------------

// The lanes of one tile of rows, in registers while a block of columns passes.
template <std::size_t kRows, std::size_t kFactors>
struct RowSums {
  F32 lanes[kRows][kFactors][kRowParts];

  template <typename Move>
  void each(std::size_t rank, float (*kept)[kRowLanes], Move move) {
    for (std::size_t r = 0; r < kRows; ++r)
      for (std::size_t k = 0; k < kFactors; ++k)
        for (std::size_t part = 0; part < kRowParts; ++part)
          move(lanes[r][k][part], kept[r * rank + k] + part * kLanes);
  }

  void add(const float* v, const float* q, std::size_t columns, std::size_t part, auto amount) {
    F32 values[kRows];
    for (std::size_t r = 0; r < kRows; ++r) values[r] = load<Floats>(v + r * columns, 0, amount);
    for (std::size_t k = 0; k < kFactors; ++k) {
      const F32 factor = load<Floats>(q + k * columns, 0, amount);
      for (std::size_t r = 0; r < kRows; ++r) lanes[r][k][part] += values[r] * factor;
    }
  }
};

// Adds v[0, n) · q[0, n) to the kept lanes, for a tile of rows and factors.
template <std::size_t kRows, std::size_t kFactors>
void add_rows(const float* v, const float* q, std::size_t n, Factors of, float (*kept)[kRowLanes]) {
  RowSums<kRows, kFactors> sums;
  sums.each(of.rank, kept, [](F32& lane, float* at) { lane = load<Floats>(at, 0, All{}); });
  std::size_t j = 0;
  for (; j + kRowLanes <= n; j += kRowLanes)
    for (std::size_t part = 0; part < kRowParts; ++part)
      sums.add(v + j + part * kLanes, q + j + part * kLanes, of.columns, part, All{});
  for (std::size_t part = 0; part < kRowParts && j < n; ++part, j += kLanes)
    if (const std::size_t left = n - j; left < kLanes)
      sums.add(v + j, q + j, of.columns, part, left);
    else
      sums.add(v + j, q + j, of.columns, part, All{});
  sums.each(of.rank, kept, [](F32 lane, float* at) { store<Floats>(at, 0, All{}, lane); });
}

template <std::size_t kRows>
void left_rows(const float* x, const float* residual, float* v, const float* q, float* p,
               Factors of) {
  float kept[kRows * kMostRank][kRowLanes];
  __builtin_memset(kept, 0, kRows * of.rank * sizeof kept[0]);
  for (std::size_t j = 0; j < of.columns; j += kRowBlock) {
    const std::size_t n = of.columns - j < kRowBlock ? of.columns - j : kRowBlock;
    for (std::size_t r = 0; residual != nullptr && r < kRows; ++r) {
      const std::size_t at = r * of.columns + j;
      const Source<true> sum{x + at, residual + at};
      sweep<kLanes>(
          n, [=](std::size_t i, auto part) { store<Floats>(v + at, i, part, sum(i, part)); });
    }
    tiles<kLeftTile>(of.rank, [&](std::size_t k, auto factors) {
      add_rows<kRows, decltype(factors)::value>((residual != nullptr ? v : x) + j,
                                                q + k * of.columns + j, n, of, kept + k);
    });
  }
  for (std::size_t r = 0; r < kRows; ++r)
    for (std::size_t k = 0; k < of.rank; ++k) p[k * of.rows + r] = tree_sum(kept[r * of.rank + k]);
}

void left(const float* x, const float* residual, float* v, const float* q, float* p,
          Factors of) noexcept {
  tiles<kLeftTile>(of.rows, [&](std::size_t i, auto rows) {
    const std::size_t at = i * of.columns;
    if (residual == nullptr)
      left_rows<decltype(rows)::value>(x + at, nullptr, nullptr, q, p + i, of);
    else
      left_rows<decltype(rows)::value>(x + at, residual + at, v + at, q, p + i, of);
  });
}

// ---- q = vᵀ·p: sums along columns --------------------------------------------------------------

// Copies p[k, i] of a few rows, times a power of two, so that the elements of one row lie side by
// side.
void pick_rows(const float* p, std::size_t rows, float scale, Factors of, float* picked) {
  for (std::size_t r = 0; r < rows; ++r)
    for (std::size_t k = 0; k < of.rank; ++k) picked[r * of.rank + k] = p[k * of.rows + r] * scale;
}

template <std::size_t kFactors, std::size_t kWide>
void add_columns(const float* v, const float* picked, std::size_t rows, float* q, Factors of,
                 auto amount) {
  F32 sums[kFactors][kWide] = {};
  for (std::size_t r = 0; r < rows; ++r) {
    F32 values[kWide];
    for (std::size_t c = 0; c < kWide; ++c)
      values[c] = load<Floats>(v + r * of.columns, c * kLanes, amount);
    for (std::size_t k = 0; k < kFactors; ++k) {
      const float factor = picked[r * of.rank + k];
      for (std::size_t c = 0; c < kWide; ++c) sums[k][c] += values[c] * factor;
    }
  }
  for (std::size_t k = 0; k < kFactors; ++k)
    for (std::size_t c = 0; c < kWide; ++c) {
      float* at = q + k * of.columns + c * kLanes;
      store<Floats>(at, 0, amount, load<Floats>(at, 0, amount) + sums[k][c]);
    }
}

// Calls body(column, Count<vectors>, amount) for all columns.
template <std::size_t kMost, typename Body>
void column_tiles(std::size_t columns, Body body) {
  const std::size_t whole = columns / kLanes, rest = columns % kLanes;
  tiles<kMost>(whole, [&](std::size_t c, auto vectors) { body(c * kLanes, vectors, All{}); });
  if (rest > 0) body(columns - rest, Count<1>{}, rest);
}

void right(const float* v, const float* p, float* q, Factors of) noexcept {
  if (of.columns > 0) __builtin_memset(q, 0, of.rank * of.columns * sizeof(float));
  float picked[kColumnBlock * kMostRank];
  for (std::size_t i = 0; i < of.rows; i += kColumnBlock) {
    const std::size_t rows = of.rows - i < kColumnBlock ? of.rows - i : kColumnBlock;
    pick_rows(p + i, rows, kHeadroom, of, picked);
    column_tiles<kVectors>(of.columns, [&](std::size_t j, auto vectors, auto amount) {
      tiles<kTile>(of.rank, [&](std::size_t k, auto factors) {
        add_columns<decltype(factors)::value, decltype(vectors)::value>(
            v + i * of.columns + j, picked + k, rows, q + k * of.columns + j, of, amount);
      });
    });
  }
}

// ---- y = p·qᵀ ----------------------------------------------------------------------------------

F32 limit(F32 x) {
  const F32 most = splat(0x1.FFFFFEp127F);
  const F32 below = x < most ? x : most;
  return below > -most ? below : -most;
}

template <std::size_t kRows, std::size_t kWide>
void add_product(F32 (&sums)[kRows][kWide], const float* picked, const float* q, Factors of,
                 auto amount) {
  for (std::size_t k = 0; k < of.rank; ++k) {
    F32 values[kWide];
    for (std::size_t c = 0; c < kWide; ++c)
      values[c] = load<Floats>(q + k * of.columns, c * kLanes, amount);
    for (std::size_t r = 0; r < kRows; ++r) {
      const float factor = picked[r * of.rank + k];
      for (std::size_t c = 0; c < kWide; ++c) sums[r][c] += values[c] * factor;
    }
  }
}

template <std::size_t kRows, std::size_t kWide>
void product_tile(const float* picked, const float* q, float scale, float* y, Factors of,
                  auto amount) {
  F32 sums[kRows][kWide] = {};
  add_product(sums, picked, q, of, amount);
  for (std::size_t r = 0; r < kRows; ++r)
    for (std::size_t c = 0; c < kWide; ++c)
      store<Floats>(y + r * of.columns, c * kLanes, amount, limit(sums[r][c] * scale));
}

template <std::size_t kRows, std::size_t kWide>
void lost_tile(const float* picked, const float* q, float scale, const float* v, float* error,
               Factors of, auto amount) {
  F32 sums[kRows][kWide] = {};
  add_product(sums, picked, q, of, amount);
  for (std::size_t r = 0; r < kRows; ++r)
    for (std::size_t c = 0; c < kWide; ++c) {
      const F32 value = load<Floats>(v + r * of.columns, c * kLanes, amount);
      const F32 sent = limit(sums[r][c] * scale);
      store<Floats>(error + r * of.columns, c * kLanes, amount, limit(value - sent));
    }
}

void product(const LowRankResult& result, Factors of) noexcept {
  float picked[kTile * kMostRank];
  tiles<kTile>(of.rows, [&](std::size_t i, auto rows) {
    constexpr std::size_t kRows = decltype(rows)::value;
    pick_rows(result.p + i, kRows, 1, of, picked);
    column_tiles<kVectors>(of.columns, [&](std::size_t j, auto vectors, auto amount) {
      constexpr std::size_t kWide = decltype(vectors)::value;
      const std::size_t at = i * of.columns + j;
      if (result.error != nullptr)
        lost_tile<kRows, kWide>(picked, result.own_q + j, result.own_scale, result.v + at,
                                result.error + at, of, amount);
      product_tile<kRows, kWide>(picked, result.q + j, result.scale, result.y + at, of, amount);
    });
  });
}

constexpr LowRankKernels kKernels = {left, right, product};

}  // namespace lowrank
}  // namespace
}  // namespace gradwire::codec
