#include "gradwire/cuda/gpu_lowrank.h"

#include <algorithm>
#include <string>

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
  left_ = right_ = most_left_ = 0;
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
    most_left_ = std::max(most_left_, matrices_.back().left_size());
  }
}

void LowRankReduce::take_room(bool captured) {
  const std::size_t doubles = aligned(8 * most_left_), lefts = aligned(4 * left_),
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

Memory LowRankReduce::memory_of(const Call& call, const Factored& each) const {
  if (call.feedback == nullptr) return {};
  const Feedback::Key& key = *call.table->keys[each.key];
  return {{key.memory[0] + each.memory, key.memory[1] + each.memory}, key.key_state};
}

RunFeedback LowRankReduce::run_feedback_of(const Call& call, std::size_t extent) const {
  return call.feedback == nullptr ? RunFeedback{} : call.extent_feedback[extent].run_feedback;
}

// Returns V: the input plus the residual, if there is one.
const float* LowRankReduce::values(const Call& call, const Factored& each) const {
  return call.feedback == nullptr ? in(call, each.extent) : out(call, each.extent);
}

void LowRankReduce::make_left(const Call& call) {
  const Api& api = of_.api_;
  for (std::size_t i : plain_) {
    if (out(call, i) != in(call, i))
      check(
          api,
          api.copy(out(call, i), in(call, i), 4 * call.counts[i], CopyKind::kOnDevice, call.stream),
          "cudaMemcpyAsync");
    if (call.feedback != nullptr)
      check(api, api.deliver(run_feedback_of(call, i), out(call, i), call.counts[i], call.stream),
            "delivering");
  }
  for (const Factored& each : matrices_) {
    float* const q = rights_ + each.right;
    check(api, api.start_factor(memory_of(call, each), each.of, q, call.stream),
          "starting a factor");
    check(api,
          api.left_factor(in(call, each.extent), run_feedback_of(call, each.extent),
                          out(call, each.extent), q, lefts_ + each.left, each.of, call.stream),
          "making a left factor");
  }
}

// Makes the right factors. It checks only the left ones, since any NaN or Inf of a matrix is in
// these.
void LowRankReduce::make_right(const Call& call) {
  const Api& api = of_.api_;
  check(api, api.check_finite(lefts_, left_, call.flags, call.stream), "looking for NaN");
  for (std::size_t i : plain_)
    check(api, api.check_finite(out(call, i), call.counts[i], call.flags, call.stream),
          "looking for NaN");
  for (const Factored& each : matrices_) {
    float* const p = lefts_ + each.left;
    check(api, api.orthonormalise(p, columns_, each.of, call.stream), "orthonormalising");
    check(api,
          api.right_factor(values(call, each), p, own_rights_ + each.right, each.of, call.stream),
          "making a right factor");
  }
  check(api, api.copy(rights_, own_rights_, 4 * right_, CopyKind::kOnDevice, call.stream),
        "cudaMemcpyAsync");
}

void LowRankReduce::finish(const Call& call) {
  const Api& api = of_.api_;
  const bool average = call.request->op == ReduceOp::kAvg;
  const double factor = average ? 1.0 / of_.setting_.size : 1.0;
  for (std::size_t i : plain_)
    if (average)
      check(api,
            api.scale(static_cast<int>(DType::kFloat32), out(call, i), factor, call.counts[i],
                      call.stream),
            "scaling");
  float* scale = scales_;
  for (const Factored& each : matrices_) {
    float *const q = rights_ + each.right, *const own = own_rights_ + each.right;
    check(api, api.take_headroom(q, each.right_size(), scale, call.stream), "scaling a factor");
    check(api, api.take_headroom(own, each.right_size(), scale + 1, call.stream),
          "scaling a factor");
    check(api,
          api.product(lefts_ + each.left, q, scale, static_cast<float>(factor), own, scale + 1,
                      values(call, each), run_feedback_of(call, each.extent),
                      out(call, each.extent), each.of, call.stream),
          "multiplying factors");
    if (call.feedback != nullptr)
      check(api, api.remember(memory_of(call, each), q, each.right_size(), call.stream),
            "remembering a factor");
    scale += 2;
  }
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
