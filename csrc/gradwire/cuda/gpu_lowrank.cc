#include "gradwire/cuda/gpu_lowrank.h"

#include "gradwire/base/error.h"
#include "gradwire/exec/compound/lowrank_reduce.h"

namespace gradwire::cuda {
namespace {

const float* in(const Call& call, std::size_t extent) {
  return reinterpret_cast<const float*>(call.request->inputs[extent].data);
}
float* out(const Call& call, std::size_t extent) {
  return reinterpret_cast<float*>(call.request->outputs[extent].data);
}

exec::Array array_at(float* values, std::size_t count) {
  return {reinterpret_cast<std::byte*>(values), count};
}

}  // namespace

LowRankReduce::LowRankReduce(Communicator& of)
    : of_(of),
      operation_(of.api_, {of.setting_.rank, of.setting_.size, of.messages_.get(), &of.plans_}),
      room_(of.api_) {}

void LowRankReduce::run(Call& call) {
  list(call);
  take_room(call.captured);
  of_.begin(call);
  open(call);
  list_for_kernels(call);
  make_left(call);
  std::vector<exec::Array> arrays;
  for (const Factored& each : matrices_)
    arrays.push_back(array_at(lefts_ + each.left, each.left_size()));
  for (std::size_t extent : plain_) arrays.push_back(call.request->outputs[extent]);
  if (of_.setting_.size > 1) sum(call, arrays);
  make_right(call);
  arrays.clear();
  for (const Factored& each : matrices_)
    arrays.push_back(array_at(rights_ + each.right, each.right_size()));
  if (!arrays.empty()) sum(call, arrays);
  finish(call);
  of_.poison(call);
  if (call.feedback != nullptr) of_.settle(call, /*shared=*/true, /*remembers=*/true);
}

// Lists the matrices to factor, and the plain extents. A single rank factors nothing, since it
// sends nothing.
void LowRankReduce::list(const Call& call) {
  const auto rank = call.request->codec->definition().rank;
  matrices_.clear();
  plain_.clear();
  left_ = right_ = 0;
  for (std::size_t i = 0; i < call.counts.size(); ++i) {
    const auto& shapes = call.request->shapes;
    const exec::Shape shape = shapes.empty() ? exec::Shape{1, call.counts[i]} : shapes[i];
    const codec::Factors of{shape.rows, shape.columns, rank};
    if (of_.setting_.size == 1 || !codec::worth_factoring(of)) {
      plain_.push_back(i);
      continue;
    }
    matrices_.push_back({i, {shape.rows, shape.columns, rank}, left_, right_, 0, 0});
    left_ += matrices_.back().left_size();
    right_ += matrices_.back().right_size();
  }
}

void LowRankReduce::take_room(bool captured) {
  const std::size_t doubles = aligned(8 * left_), lefts = aligned(4 * left_),
                    rights = aligned(4 * right_), scales = aligned(8 * matrices_.size());
  std::byte* at = room_.take(doubles + lefts + 2 * rights + scales, captured);
  columns_ = reinterpret_cast<double*>(at);
  lefts_ = reinterpret_cast<float*>(at += doubles);
  rights_ = reinterpret_cast<float*>(at += lefts);
  own_rights_ = reinterpret_cast<float*>(at += rights);
  scales_ = reinterpret_cast<float*>(at + rights);
}

// Binds the feedback. The factors of one key's matrices lie end to end in the key's memory.
void LowRankReduce::open(Call& call) {
  if (call.feedback == nullptr) return of_.bind_feedback(call);
  of_.bind_feedback(call);
  std::vector<std::uint64_t> remembered(call.request->keys.size(), 0);
  for (Factored& each : matrices_) {
    each.key = call.keys[each.extent].key;
    each.memory = remembered[each.key];
    remembered[each.key] += each.right_size();
  }
  call.feedback->remember(*call.table, remembered, call.captured, call.stream);
}

void LowRankReduce::list_for_kernels(const Call& call) {
  given_.clear();
  for (const Factored& each : matrices_)
    given_.push_back({.of = each.of,
                      .x = in(call, each.extent),
                      .y = out(call, each.extent),
                      .run_feedback = run_feedback_of(call, each.extent),
                      .memory = memory_of(call, each),
                      .p = lefts_ + each.left,
                      .room = columns_ + each.left,
                      .q = rights_ + each.right,
                      .own_q = own_rights_ + each.right,
                      .scales = scales_ + 2 * given_.size()});
  plain_runs_.clear();
  for (const std::size_t i : plain_)
    plain_runs_.push_back({.x = in(call, i),
                           .y = out(call, i),
                           .n = call.counts[i],
                           .run_feedback = run_feedback_of(call, i)});
}

Memory LowRankReduce::memory_of(const Call& call, const Factored& each) const {
  if (call.feedback == nullptr) return {};
  const Feedback::Key& key = *call.table->keys[each.key];
  return {{key.memory[0] + each.memory, key.memory[1] + each.memory}, key.key_state};
}

RunFeedback LowRankReduce::run_feedback_of(const Call& call, std::size_t extent) const {
  return call.feedback == nullptr ? RunFeedback{} : call.extent_feedback[extent].run_feedback;
}

void LowRankReduce::make_left(const Call& call) {
  const Api& api = of_.api_;
  const auto matrices = static_cast<int>(given_.size());
  for (std::size_t i : plain_)
    if (call.feedback == nullptr && out(call, i) != in(call, i))
      check(
          api,
          api.copy(out(call, i), in(call, i), 4 * call.counts[i], CopyKind::kOnDevice, call.stream),
          "cudaMemcpyAsync");
  if (call.feedback != nullptr)
    check(api,
          api.deliver_runs(plain_runs_.data(), static_cast<int>(plain_runs_.size()), call.stream),
          "delivering");
  check(api, api.start_factor(given_.data(), matrices, call.stream), "starting factors");
  check(api, api.left_factor(given_.data(), matrices, call.stream), "making left factors");
}

// Makes the right factors. It checks only the left ones, since any NaN or Inf of a matrix is in
// these.
void LowRankReduce::make_right(const Call& call) {
  const Api& api = of_.api_;
  const auto matrices = static_cast<int>(given_.size());
  check(api, api.check_finite(lefts_, left_, call.flags, call.stream), "looking for NaN");
  check(api,
        api.mark_runs(plain_runs_.data(), static_cast<int>(plain_runs_.size()), 1, call.flags,
                      call.stream),
        "looking for NaN");
  check(api, api.orthonormalise(given_.data(), matrices, call.stream), "orthonormalising");
  check(api, api.right_factor(given_.data(), matrices, call.stream), "making right factors");
  check(api, api.copy(rights_, own_rights_, 4 * right_, CopyKind::kOnDevice, call.stream),
        "cudaMemcpyAsync");
}

void LowRankReduce::finish(const Call& call) {
  const Api& api = of_.api_;
  const auto matrices = static_cast<int>(given_.size());
  const bool average = call.request->op == ReduceOp::kAvg;
  const double factor = average ? 1.0 / of_.setting_.size : 1.0;
  for (std::size_t i : plain_)
    if (average)
      check(api,
            api.scale(static_cast<int>(DType::kFloat32), out(call, i), factor, call.counts[i],
                      call.stream),
            "scaling");
  check(api, api.take_headroom(given_.data(), matrices, call.stream), "scaling factors");
  check(api, api.product(given_.data(), matrices, static_cast<float>(factor), call.stream),
        "multiplying factors");
  check(api, api.remember(given_.data(), matrices, call.stream), "remembering factors");
}

void LowRankReduce::sum(const Call& call, const std::vector<exec::Array>& arrays) {
  exec::Request request;
  request.collective = Collective::kAllReduce;
  request.algorithm = call.request->algorithm;
  request.schedule = call.request->schedule;
  request.schedule_digest = call.request->schedule_digest;
  request.inputs = request.outputs = arrays;
  operation_.bind(request, call.captured);
  operation_.begin(call.stream);
  operation_.run({}, {}, call.stream);
}

}  // namespace gradwire::cuda
