// The steps of a CpuDevice in which matrices travel as two factors (codec/lowrank.h).
#include <algorithm>
#include <cstring>

#include "gradwire/codec/feedback/residuals.h"
#include "gradwire/codec/lowrank.h"
#include "gradwire/codec/simd/simd.h"
#include "gradwire/exec/program/cpu_device.h"

namespace gradwire::exec {

Device::FactorRoom CpuDevice::take_factor_room(std::size_t left, std::size_t right) {
  factors_.left.resize(left);
  factors_.right.resize(right);
  factors_.own_right.resize(right);
  return {factors_.left.data(), factors_.right.data(), factors_.own_right.data()};
}

// Computes P = V·q. Input plus residual take the place of the output.
void CpuDevice::make_left(std::span<const Matrix> matrices) {
  const Stopwatch stopwatch(spent_.encode);
  for (const Matrix& each : matrices) {
    codec::start_factor(last_right(each), each.of, {each.right, each.right_size()});
    codec::kernels().lowrank.left(input_with_narrow(each.array),
                                  feedback_.contexts()[each.array.index].residual, each.array.y,
                                  each.right, each.left, each.of);
  }
}

// Adds a narrow residual to the input, in the output, since the passes over a matrix read wide
// ones. Returns the sum, or the input itself where no residual is narrow.
const float* CpuDevice::input_with_narrow(const SummedArray& array) const {
  const codec::EncodeContext& context = feedback_.contexts()[array.index];
  if (context.narrow_residual == nullptr) return array.x;
  if (array.y != array.x) std::memcpy(array.y, array.x, array.count * sizeof(float));
  codec::add_residual(context, array.y, array.count);
  return array.y;
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
  finite_ = kernels.finite(factors_.left.data(), factors_.left.size()) && finite_;
  if (!finite_) return false;
  for (const Matrix& each : matrices) {
    codec::orthonormalise(each.of, {each.left, each.left_size()}, factors_.room);
    kernels.lowrank.right(values(each), each.left, each.own_right, each.of);
  }
  std::ranges::copy(factors_.own_right, factors_.right.begin());
  return true;
}

// Returns V, the input plus the residual.
const float* CpuDevice::values(const Matrix& matrix) const {
  const bool added = feedback_.contexts()[matrix.array.index].has_residual();
  return added ? matrix.array.y : matrix.array.x;
}

void CpuDevice::multiply(std::span<const Matrix> matrices) {
  const Stopwatch stopwatch(spent_.decode);
  const bool average = original_.op == ReduceOp::kAvg;
  const auto factor = static_cast<float>(average ? 1.0 / original_.size : 1.0);
  for (const Matrix& each : matrices) {
    const codec::EncodeContext& context = feedback_.contexts()[each.array.index];
    codec::LowRankResult result;
    result.p = each.left;
    result.q = each.right;
    result.scale = factor * codec::take_headroom({each.right, each.right_size()});
    result.y = each.array.y;
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
      feedback_.context(matrix.array.index, original_.rank, /*operation=*/0);
  const std::size_t columns = matrix.of.columns, factors = matrix.of.rank;
  const std::size_t most = std::clamp<std::size_t>(kElements / columns, 1, matrix.of.rows);
  const float* p = result.p;
  factors_.rows_of_left.resize(most * factors);
  factors_.error.resize(most * columns);
  result.error = factors_.error.data();
  for (std::size_t row = 0; row < matrix.of.rows; row += most) {
    const std::size_t rows = std::min(most, matrix.of.rows - row);
    for (std::size_t k = 0; k < factors; ++k)
      std::copy_n(p + k * matrix.of.rows + row, rows, factors_.rows_of_left.data() + k * rows);
    result.p = factors_.rows_of_left.data();
    codec::kernels().lowrank.product(result, {rows, columns, factors});
    codec::keep(context.from(row * columns), factors_.error.data(), rows * columns);
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
