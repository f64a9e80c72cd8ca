// A matrix as the product of two factors, and the three passes over it that PowerSGD makes. Their
// arithmetic is the same for every instruction set and for CUDA: binary32, each product rounded,
// then each sum; no FMA. Every sum begins at +0. Finite arguments give finite results.
#pragma once

#include <cstddef>

namespace gradwire::codec {

// v is rows × columns, row by row without gaps. p holds `rank` vectors of `rows` elements, one
// after the other; q `rank` vectors of `columns` elements. All of it is float32 of any alignment.
struct Factors {
  std::size_t rows = 0;
  std::size_t columns = 0;
  std::size_t rank = 0;  // 1 to kMostRank
};
inline constexpr std::size_t kMostRank = 32;

// Factors of large values are scaled down by this, so that sums over a row, a column and all ranks
// (2^31 terms) stay in the range of float32. It is a power of two, so it costs no digits of values
// above 2^-70.
inline constexpr float kHeadroom = 0x1p-32F;

// What the last pass reads and writes: the result of all ranks, and the error of this rank's part.
struct LowRankResult {
  const float* p;      // orthonormal columns
  const float* q;      // the sum over all ranks
  float scale;         // y = limit(p·qᵀ · scale)
  float* y;            // may be v
  const float* own_q;  // this rank's
  float own_scale;
  const float* v;
  float* error;  // limit(v − limit(p·own_qᵀ · own_scale)); null: not kept, the others unused
};

struct LowRankKernels {
  // p[k, i] = Σ_j v[i, j] · q[k, j] with v = x + residual, which is written to v (may be x); null
  // residual: v = x, and nothing is written to v. Element j is added to lane j mod 16, in ascending
  // j; then lane l takes lane l + w, for w = 8, 4, 2, 1.
  void (*left)(const float* x, const float* residual, float* v, const float* q, float* p,
               Factors) noexcept;
  // q[k, j] = Σ_i v[i, j] · (p[k, i] · kHeadroom): eight rows at a time are summed in ascending i,
  // and their sum is added to q.
  void (*right)(const float* v, const float* p, float* q, Factors) noexcept;
  // (p·qᵀ)[i, j] = Σ_k q[k, j] · p[k, i], in ascending k. limit() is ±the largest finite float32
  // at most.
  void (*product)(const LowRankResult&, Factors) noexcept;
};

}  // namespace gradwire::codec
