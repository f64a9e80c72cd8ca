#include "gradwire/codec/reduction/fold.h"

#include <algorithm>
#include <cstring>

namespace gradwire::codec {
namespace {

constexpr std::size_t kBlock = 1024;  // elements: 4 KiB on the stack, which stay in the cache

void fold_wide(const WideKernels& wide, std::span<std::byte* const> x, std::size_t offset,
               std::byte* y, float factor, std::size_t n) noexcept {
  float sum[kBlock];
  for (std::size_t i = 0; i < n; i += kBlock) {
    const std::size_t count = std::min(kBlock, n - i), at = offset + 2 * i;
    wide.begin(x[0] + at, x[1] + at, sum, count);
    for (std::byte* each : x.subspan(2)) wide.fold(sum, each + at, count);
    wide.round(sum, factor, y + 2 * i, count);
  }
}

}  // namespace

const WideKernels* wide_kernels(DType dtype, ReduceOp op) noexcept {
  if (dtype != DType::kFloat16 && dtype != DType::kBFloat16) return nullptr;
  const WideTable& of = kernels().wide;
  const bool half = dtype == DType::kFloat16;
  if (op == ReduceOp::kSum || op == ReduceOp::kAvg) return half ? &of.fp16_sum : &of.bf16_sum;
  if (op == ReduceOp::kProd) return half ? &of.fp16_prod : &of.bf16_prod;
  return nullptr;
}

void fold_all(DType dtype, ReduceOp op, std::span<std::byte* const> x, std::size_t offset,
              std::byte* y, int divisor, std::size_t n) noexcept {
  if (n == 0) return;
  if (const WideKernels* wide = wide_kernels(dtype, op); wide != nullptr && x.size() > 1)
    return fold_wide(*wide, x, offset, y, static_cast<float>(1.0 / divisor), n);
  const auto fold = kernels().reduce[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)];
  std::memcpy(y, x[0] + offset, n * size_of(dtype));
  for (std::byte* each : x.subspan(1)) fold(y, each + offset, n);
  if (divisor > 1) average(dtype, y, divisor, n);
}

void average(DType dtype, void* x, int ranks, std::size_t n) noexcept {
  kernels().scale[static_cast<std::size_t>(dtype)](x, 1.0 / ranks, n);
}

}  // namespace gradwire::codec
