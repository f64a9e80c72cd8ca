// The steps of a CpuDevice in which matrices travel as two factors (codec/lowrank.h).
#include <algorithm>
#include <cstring>

#include "gradwire/codec/feedback/residuals.h"
#include "gradwire/codec/lowrank.h"
#include "gradwire/codec/simd/simd.h"
#include "gradwire/exec/program/cpu_device.h"

namespace gradwire::exec {

Device::FactorRoom CpuDevice::take_factor_room(std::size_t left, std::size_t right) {
  left_.resize(left);
  right_.resize(right);
  own_right_.resize(right);
  return {left_.data(), right_.data(), own_right_.data()};
}

// Computes P = V·q. Input plus residual take the place of the output.
void CpuDevice::make_left(std::span<const Matrix> matrices) {
  const Stopwatch stopwatch(spent_.encode);
  for (const Matrix& each : matrices) {
    codec::start_factor(last_right(each), each.of, {each.right, each.right_size()});
    codec::kernels().lowrank.left(input_with_narrow(each.extent),
                                  feedback_.contexts()[each.extent.index].residual, each.extent.y,
                                  each.right, each.left, each.of);
  }
}

// Adds a narrow residual to the input, in the output, since the passes over a matrix read wide
// ones. Returns the sum, or the input itself where no residual is narrow.
const float* CpuDevice::input_with_narrow(const Extent& extent) const {
  const codec::EncodeContext& context = feedback_.contexts()[extent.index];
  if (context.narrow_residual == nullptr) return extent.x;
  if (extent.y != extent.x) std::memcpy(extent.y, extent.x, extent.count * sizeof(float));
  codec::add_residual(context, extent.y, extent.count);
  return extent.y;
}

// Returns the last call's factor, or as much of it as there is.
std::span<const float> CpuDevice::last_right(const Matrix& matrix) const {
  if (!feedback_.feeds_back()) return {};
  const std::span<const float> memory = transaction_.memory(matrix.in_memory.key);
  return memory.subspan(std::min(matrix.in_memory.begin, memory.size()));
}

// A NaN or Inf of any matrix is in its left factor, and finite left factors have finite right
// factors (codec/factors.h).
bool CpuDevice::make_right(std::span<const Matrix> matrices) {
  const Stopwatch stopwatch(spent_.encode);
  const auto& kernels = codec::kernels();
  finite_ = kernels.finite(left_.data(), left_.size()) && finite_;
  if (!finite_) return false;
  for (const Matrix& each : matrices) {
    codec::orthonormalise(each.of, {each.left, each.left_size()}, room_);
    kernels.lowrank.right(values(each), each.left, each.own_right, each.of);
  }
  std::ranges::copy(own_right_, right_.begin());
  return true;
}

// Returns V, the input plus the residual.
const float* CpuDevice::values(const Matrix& matrix) const {
  const bool added = feedback_.contexts()[matrix.extent.index].has_residual();
  return added ? matrix.extent.y : matrix.extent.x;
}

void CpuDevice::multiply(std::span<const Matrix> matrices) {
  const Stopwatch stopwatch(spent_.decode);
  const bool average = original_.op == ReduceOp::kAvg;
  const auto factor = static_cast<float>(average ? 1.0 / original_.size : 1.0);
  for (const Matrix& each : matrices) {
    const codec::EncodeContext& context = feedback_.contexts()[each.extent.index];
    codec::LowRankResult result;
    result.p = each.left;
    result.q = each.right;
    result.scale = factor * codec::take_headroom({each.right, each.right_size()});
    result.y = each.extent.y;
    result.own_q = each.own_right;
    result.own_scale = codec::take_headroom({each.own_right, each.right_size()});
    result.v = values(each);
    result.error = context.error;
    if (context.narrow_error == nullptr)
      codec::kernels().lowrank.product(result, each.of);
    else
      multiply_by_rows(result, each);
    if (feedback_.feeds_back()) remember(each);
  }
}

// Makes the product a few rows at a time, and rounds their error before the next rows. Each element
// has the same sum as in one pass.
void CpuDevice::multiply_by_rows(codec::LowRankResult result, const Matrix& matrix) {
  constexpr std::size_t kElements = 16384;
  const codec::EncodeContext context =
      feedback_.context(matrix.extent.index, original_.rank, /*operation=*/0);
  const std::size_t columns = matrix.of.columns, factors = matrix.of.rank;
  const std::size_t most = std::clamp<std::size_t>(kElements / columns, 1, matrix.of.rows);
  const float* p = result.p;
  rows_of_left_.resize(most * factors);
  error_.resize(most * columns);
  result.error = error_.data();
  for (std::size_t row = 0; row < matrix.of.rows; row += most) {
    const std::size_t rows = std::min(most, matrix.of.rows - row);
    for (std::size_t k = 0; k < factors; ++k)
      std::copy_n(p + k * matrix.of.rows + row, rows, rows_of_left_.data() + k * rows);
    result.p = rows_of_left_.data();
    codec::kernels().lowrank.product(result, {rows, columns, factors});
    codec::keep(context.from(row * columns), error_.data(), rows * columns);
    result.y += rows * columns;
    result.v += rows * columns;
  }
}

// Keeps the right factor, with which the next call begins.
void CpuDevice::remember(const Matrix& matrix) {
  const auto [key, begin] = matrix.in_memory;
  std::vector<float>& memory = transaction_.next_memory(key);
  memory.resize(begin + matrix.right_size());
  std::copy_n(matrix.right, matrix.right_size(),
              memory.begin() + static_cast<std::ptrdiff_t>(begin));
}

}  // namespace gradwire::exec
