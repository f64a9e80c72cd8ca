// Folds that round once, where one rank has several addends: sums, averages and products of 16-bit
// floats are formed in float32.
#pragma once

#include <cstddef>
#include <span>

#include "gradwire/base/types.h"
#include "gradwire/codec/simd/simd.h"

namespace gradwire::codec {

// Returns the kernels of those reductions; null for all others, which lose nothing by folding one
// addend at a time.
const WideKernels* wide_kernels(DType dtype, ReduceOp op) noexcept;

// y := x[0] (op) x[1] (op) … in this order, averaged over `divisor` ranks unless that is 1. Each
// array begins `offset` bytes behind its x[i]. y must not overlap them.
void fold_all(DType dtype, ReduceOp op, std::span<std::byte* const> x, std::size_t offset,
              std::byte* y, int divisor, std::size_t n) noexcept;

// x[i] := x[i] * (1 / ranks), rounded once in the element type. For types of which avg is defined.
void average(DType dtype, void* x, int ranks, std::size_t n) noexcept;

}  // namespace gradwire::codec
