#include "gradwire/exec/compound/lowrank_reduce.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "gradwire/base/error.h"
#include "gradwire/codec/feedback/residuals.h"
#include "gradwire/codec/simd/simd.h"
#include "gradwire/exec/plan/gather_algorithm.h"

namespace gradwire::exec {
namespace {

Array array_at(std::vector<float>& values, std::size_t first, std::size_t count) {
  return {reinterpret_cast<std::byte*>(values.data() + first), count};
}

void check_shapes(const Request& request) {
  const auto& shapes = request.shapes;
  const std::string codec = "codec '" + request.codec->name() + "'";
  if (shapes.size() != request.inputs.size())
    throw InvalidArgument(codec + ": " + std::to_string(shapes.size()) + " shapes for " +
                          std::to_string(request.inputs.size()) + " arrays");
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    const auto [rows, columns] = shapes[i];
    const std::size_t count = request.inputs[i].count;
    if (rows == 0 || columns == 0 ? count == 0 : count / rows == columns && count % rows == 0)
      continue;
    throw InvalidArgument(codec + ": array " + std::to_string(i) + " has " + std::to_string(count) +
                          " elements, which are no " + std::to_string(rows) + " x " +
                          std::to_string(columns) + " matrix");
  }
}

}  // namespace

void check_lowrank(const Request& request) {
  OpSpec spec;
  spec.collective = request.collective;
  spec.dtype = request.dtype;
  spec.op = request.op;
  Plan::check_types(spec, *request.codec);
  if (request.collective != Collective::kAllReduce)
    throw ScheduleError("codec '" + request.codec->name() +
                        "' needs the sum of all factors on all ranks; use all_reduce, not " +
                        std::string(name_of(request.collective)));
  if (is_gather(request.algorithm))
    throw ScheduleError("codec '" + request.codec->name() +
                        "' has no payloads to gather: the sums of its factors travel; use auto, or "
                        "another algorithm of all_reduce");
  if (!request.shapes.empty()) check_shapes(request);
}

// ---- At submission -----------------------------------------------------------------------------

void LowRankReduce::begin() {
  check_lowrank(original());
  phase_ = 0;
  feedback_.bind(counts(), original().keys, transaction());
  list_matrices(static_cast<const codec::LowRank&>(*original().codec).rank());
  if (feedback_.feeds_back()) place_in_keys();
  list_exchanges();
}

// Lists the extents that are worth factoring, and the others. A single rank factors none, as it
// sends nothing.
void LowRankReduce::list_matrices(std::size_t rank) {
  matrices_.clear();
  plain_.clear();
  std::size_t left = 0, right = 0;
  for (std::size_t i = 0; i < counts().size(); ++i) {
    const Shape shape = original().shapes.empty() ? Shape{1, counts()[i]} : original().shapes[i];
    const codec::Factors of{shape.rows, shape.columns, rank};
    if (size() == 1 || !codec::worth_factoring(of)) {
      plain_.push_back(i);
      continue;
    }
    matrices_.push_back({i, of, left, right});
    left += matrices_.back().left_size();
    right += matrices_.back().right_size();
  }
  left_.resize(left);
  right_.resize(right);
  own_right_.resize(right);
}

// Places the factors of one key's matrices end to end in its memory.
void LowRankReduce::place_in_keys() {
  std::size_t key = 0, memory = 0;
  for (Matrix& each : matrices_) {
    each.key = feedback_.key(each.extent);
    if (each.key != key) memory = 0;
    key = each.key;
    each.memory = memory;
    memory += each.right_size();
  }
}

void LowRankReduce::list_exchanges() {
  lefts_.clear();
  rights_.clear();
  for (const Matrix& each : matrices_) {
    lefts_.push_back(array_at(left_, each.left, each.left_size()));
    rights_.push_back(array_at(right_, each.right, each.right_size()));
  }
  for (std::size_t extent : plain_) lefts_.push_back(original().outputs[extent]);
}

void LowRankReduce::prepare() {
  const codec::FloatEnvironment environment;
  const Stopwatch stopwatch(spent_.encode);
  for (std::size_t extent : plain_) {
    float* y = output(extent);
    if (y != input(extent) && counts()[extent] > 0)
      std::memcpy(y, input(extent), counts()[extent] * sizeof(float));
    feedback_.deliver(extent, y);
  }
  for (const Matrix& each : matrices_) {
    const auto q = of_matrix(right_, each);
    codec::start_factor(last_right(each), each.of, q);
    codec::kernels().lowrank.left(input_with_narrow(each.extent), context(each).residual,
                                  output(each.extent), q.data(), left_.data() + each.left, each.of);
  }
}

// Adds a narrow residual to the input, in the output, since the passes over a matrix read wide
// ones. Returns the sum, or the input itself where no residual is narrow.
const float* LowRankReduce::input_with_narrow(std::size_t extent) const {
  const codec::EncodeContext& context = feedback_.contexts()[extent];
  if (context.narrow_residual == nullptr) return input(extent);
  float* v = output(extent);
  if (v != input(extent)) std::memcpy(v, input(extent), counts()[extent] * sizeof(float));
  codec::add_residual(context, v, counts()[extent]);
  return v;
}

// Returns the last call's factor, or as much of it as there is.
std::span<const float> LowRankReduce::last_right(const Matrix& matrix) {
  if (!feedback_.feeds_back()) return {};
  const std::span<const float> memory = transaction().memory(matrix.key);
  return memory.subspan(std::min(matrix.memory, memory.size()));
}

// ---- By the driver -----------------------------------------------------------------------------

const Request* LowRankReduce::next(const Progress&) {
  switch (phase_++) {
    case 0:
      if (size() > 1) return &exchange(lefts_);
      [[fallthrough]];  // a single rank has no matrices
    case 1:
      if (!orthonormalise()) {
        fill_with_nan();
        return nullptr;
      }
      if (!matrices_.empty()) return &exchange(rights_);
      [[fallthrough]];
    default:
      finish();
      return nullptr;
  }
}

// Returns whether everything is finite, alike on all ranks: a NaN or Inf of any matrix is in its
// left factor, and finite left factors have finite right factors (codec/factors.h).
bool LowRankReduce::orthonormalise() {
  const Stopwatch stopwatch(spent_.encode);
  const auto& kernels = codec::kernels();
  bool finite = kernels.finite(left_.data(), left_.size());
  for (std::size_t extent : plain_)
    finite = kernels.finite(output(extent), counts()[extent]) && finite;
  for (const Matrix& each : matrices_) {
    if (!finite) return false;
    float* q = own_right_.data() + each.right;
    codec::orthonormalise(each.of, std::span(left_).subspan(each.left, each.left_size()), room_);
    kernels.lowrank.right(values(each), left_.data() + each.left, q, each.of);
  }
  std::ranges::copy(own_right_, right_.begin());
  return finite;
}

void LowRankReduce::finish() {
  const Stopwatch stopwatch(spent_.decode);
  const bool average = original().op == ReduceOp::kAvg;
  const auto factor = static_cast<float>(average ? 1.0 / size() : 1.0);
  const auto& kernels = codec::kernels();
  const auto scale = kernels.scale[static_cast<std::size_t>(DType::kFloat32)];
  for (std::size_t extent : plain_)
    if (average) scale(output(extent), factor, counts()[extent]);
  for (const Matrix& each : matrices_) {
    codec::LowRankResult result;
    result.p = left_.data() + each.left;
    result.q = right_.data() + each.right;
    result.scale = factor * codec::take_headroom(of_matrix(right_, each));
    result.y = output(each.extent);
    result.own_q = own_right_.data() + each.right;
    result.own_scale = codec::take_headroom(of_matrix(own_right_, each));
    result.v = values(each);
    result.error = context(each).error;
    if (context(each).narrow_error == nullptr)
      kernels.lowrank.product(result, each.of);
    else
      product_by_rows(result, each);
  }
  if (feedback_.feeds_back()) remember();
  transaction().settle(true);
}

// Makes the product a few rows at a time, and rounds their error before the next rows. Each element
// has the same sum as in one pass.
void LowRankReduce::product_by_rows(codec::LowRankResult result, const Matrix& matrix) {
  constexpr std::size_t kElements = 16384;
  const codec::EncodeContext context = feedback_.context(matrix.extent, rank(), /*operation=*/0);
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

// Keeps the right factors, with which the next call begins.
void LowRankReduce::remember() {
  for (const Matrix& each : matrices_) {
    std::vector<float>& memory = transaction().next_memory(each.key);
    memory.resize(each.memory + each.right_size());
    std::copy_n(right_.begin() + static_cast<std::ptrdiff_t>(each.right), each.right_size(),
                memory.begin() + static_cast<std::ptrdiff_t>(each.memory));
  }
}

const Request& LowRankReduce::exchange(const std::vector<Array>& arrays) {
  current_ = phase(Collective::kAllReduce, DType::kFloat32, ReduceOp::kSum);
  current_.algorithm = original().algorithm;
  current_.schedule = original().schedule;
  current_.schedule_digest = original().schedule_digest;
  current_.inputs = current_.outputs = arrays;
  return current_;
}

const float* LowRankReduce::input(std::size_t extent) const {
  return reinterpret_cast<const float*>(original().inputs[extent].data);
}

float* LowRankReduce::output(std::size_t extent) const {
  return reinterpret_cast<float*>(original().outputs[extent].data);
}

const codec::EncodeContext& LowRankReduce::context(const Matrix& matrix) const {
  return feedback_.contexts()[matrix.extent];
}

// Returns V, the input plus the residual.
const float* LowRankReduce::values(const Matrix& matrix) const {
  return context(matrix).has_residual() ? output(matrix.extent) : input(matrix.extent);
}

}  // namespace gradwire::exec
