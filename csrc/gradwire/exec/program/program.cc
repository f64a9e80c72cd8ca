#include "gradwire/exec/program/program.h"

#include <algorithm>

#include "gradwire/codec/lowrank.h"

namespace gradwire::exec {

enum class Program::Step : std::uint8_t {
  kRunPlan,
  kRunNative,
  kDeliver,
  kEncode,
  kExchangeLengths,
  kExchangePayloads,
  kAddUp,
  kMakeLeft,
  kSumLefts,
  kMakeRight,
  kSumRights,
  kMultiply,
  kVote,
  kFinish,
};

std::span<const Program::Step> Program::steps_of(Method method, bool alone) {
  using enum Step;
  static constexpr Step kPlan[] = {kRunPlan, kVote, kFinish};
  static constexpr Step kNative[] = {kRunNative, kFinish};
  static constexpr Step kAlone[] = {kDeliver, kFinish};
  static constexpr Step kGather[] = {kEncode, kExchangeLengths, kExchangePayloads, kAddUp,
                                     kVote,   kFinish};
  static constexpr Step kLowRank[] = {kMakeLeft,  kSumLefts, kMakeRight,
                                      kSumRights, kMultiply, kFinish};
  static constexpr Step kExchange[] = {kExchangeLengths, kExchangePayloads, kFinish};
  switch (method) {
    case Method::kNative:
      return kNative;
    case Method::kGather:
      return alone ? std::span<const Step>(kAlone) : kGather;
    case Method::kLowRank:
      return kLowRank;
    case Method::kExchange:
      return kExchange;
    case Method::kPlan:
      break;
  }
  return kPlan;
}

void Program::bind(const Request& request, const Decision& decision, bool feeds_back,
                   Device& device) {
  request_ = &request;
  decision_ = decision;
  feeds_back_ = feeds_back;
  steps_ = steps_of(decision.method, request.size == 1);
  array_counts(request, counts_);
  key_offsets_.clear();
  if (feeds_back) find_key_offsets(counts_, request.keys, key_offsets_);
  arrays_.clear();
  matrices_.clear();
  const bool works_on_arrays = decision.method == Method::kGather ||
                               decision.method == Method::kLowRank ||
                               (decision.method == Method::kNative && feeds_back);
  if (works_on_arrays) place_arrays();
  if (decision.method == Method::kLowRank) take_matrices(device);
}

void Program::place_arrays() {
  const std::size_t arrays = request_->inputs.size();
  const std::size_t parts = arrays == 0 ? 1 : counts_.size() / arrays;  // of an input
  std::size_t offset = 0;                                               // elements
  for (std::size_t i = 0; i < counts_.size(); ++i) {
    if (i % parts == 0) offset = 0;
    const auto* x = reinterpret_cast<const float*>(request_->inputs[i / parts].data);
    arrays_.push_back({i, x + offset, output(i / parts, offset), counts_[i]});
    offset += counts_[i];
  }
}

// Returns where this rank keeps a sum; null where other ranks keep it.
float* Program::output(std::size_t array, std::size_t offset) const {
  const Request& request = *request_;
  if (request.collective == Collective::kReduce && request.rank != request.root) return nullptr;
  if (request.collective == Collective::kReduceScatter) {
    if (array != at(request.rank)) return nullptr;
    array = 0;
  }
  return reinterpret_cast<float*>(request.outputs[array].data) + offset;
}

// Takes the matrices that are worth factoring out of the arrays. A single rank factors none, as it
// sends nothing. The factors of one key's matrices lie end to end in its memory.
void Program::take_matrices(Device& device) {
  std::size_t left = 0, right = 0, memory = 0;
  std::erase_if(arrays_, [&](const SummedArray& each) {
    const Shape shape =
        request_->shapes.empty() ? Shape{1, each.count} : request_->shapes[each.index];
    const codec::Factors of{shape.rows, shape.columns, request_->codec->definition().rank};
    if (request_->size == 1 || !codec::worth_factoring(of)) return false;
    Matrix matrix;
    matrix.array = each;
    matrix.of = of;
    if (feeds_back_) {
      const std::size_t key = key_offsets_[each.index].key;
      if (matrices_.empty() || matrices_.back().in_memory.key != key) memory = 0;
      matrix.in_memory = {key, memory};
    }
    left += matrix.left_size();
    right += matrix.right_size();
    memory += matrix.right_size();
    matrices_.push_back(matrix);
    return true;
  });
  Device::FactorRoom room = device.take_factor_room(left, right);
  lefts_.clear();
  rights_.clear();
  for (Matrix& each : matrices_) {
    each.left = room.left;
    each.right = room.right;
    each.own_right = room.own_right;
    room.left += each.left_size();
    room.right += each.right_size();
    room.own_right += each.right_size();
    lefts_.push_back({reinterpret_cast<std::byte*>(each.left), each.left_size()});
    rights_.push_back({reinterpret_cast<std::byte*>(each.right), each.right_size()});
  }
  for (const SummedArray& each : arrays_)
    lefts_.push_back({reinterpret_cast<std::byte*>(each.y), each.count});
}

void Program::prepare(Device& device) {
  if (steps_.front() != Step::kMakeLeft) return;
  take(Step::kMakeLeft, device);
  steps_ = steps_.subspan(1);
}

const Request* Program::next(Device& device) {
  const Request* phase = nullptr;
  while (phase == nullptr && !steps_.empty()) {
    const Step step = steps_.front();
    steps_ = steps_.subspan(1);
    phase = take(step, device);
  }
  return phase;
}

const Request* Program::take(Step step, Device& device) {
  switch (step) {
    case Step::kRunPlan:
      return device.run_plan();
    case Step::kRunNative:
      if (feeds_back_) device.deliver(arrays_);
      device.run_native();
      if (feeds_back_) device.mark(arrays_);
      return nullptr;
    case Step::kDeliver:
      device.deliver(arrays_);
      device.mark(arrays_);
      return nullptr;
    case Step::kEncode:
      device.encode(arrays_);
      return nullptr;
    case Step::kExchangeLengths:
      return device.exchange_lengths();
    case Step::kExchangePayloads:
      return device.exchange_payloads();
    case Step::kAddUp:
      device.add_up(arrays_);
      return nullptr;
    case Step::kMakeLeft:
      device.deliver(arrays_);
      device.make_left(matrices_);
      return nullptr;
    case Step::kSumLefts:
      return request_->size > 1 ? &sum(lefts_) : nullptr;
    case Step::kMakeRight:
      device.mark(arrays_);
      if (!device.make_right(matrices_)) steps_ = steps_.last(1);
      return nullptr;
    case Step::kSumRights:
      return matrices_.empty() ? nullptr : &sum(rights_);
    case Step::kMultiply:
      if (request_->op == ReduceOp::kAvg) device.average(arrays_);
      device.multiply(matrices_);
      return nullptr;
    case Step::kVote:
      return votes(*request_, feeds_back_) ? device.vote() : nullptr;
    case Step::kFinish:
      device.finish();
      return nullptr;
  }
  return nullptr;
}

Request Program::phase(Collective collective, DType dtype, ReduceOp op) const {
  Request request;
  request.rank = request_->rank;
  request.size = request_->size;
  request.collective = collective;
  request.dtype = dtype;
  request.op = op;
  request.timeout = request_->timeout;
  request.codec_label = label_;
  return request;
}

const Request& Program::sum(const std::vector<Array>& arrays) {
  phase_ = phase(Collective::kAllReduce, DType::kFloat32, ReduceOp::kSum);
  phase_.algorithm = request_->algorithm;
  phase_.spares_bytes = true;  // whoever takes few factors has slow links
  phase_.schedule = request_->schedule;
  phase_.schedule_digest = request_->schedule_digest;
  phase_.inputs = phase_.outputs = arrays;
  return phase_;
}

}  // namespace gradwire::exec
