#include "gradwire/exec/program/cpu_device.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "gradwire/codec/feedback/residuals.h"
#include "gradwire/codec/reduction/fold.h"
#include "gradwire/codec/simd/simd.h"

namespace gradwire::exec {
namespace {

// Returns whether the ranks must all feed back or none: those that do have a phase more, or factor
// with what they remember. Elsewhere each rank may keep what it has not delivered, or not.
bool feeds_back_together(const Request& request, Method method) {
  return request.feedback &&
         (method == Method::kLowRank || request.collective != Collective::kAllReduce);
}

}  // namespace

// ---- At submission -----------------------------------------------------------------------------

void CpuDevice::bind(const Request& request, const Decision& decision) {
  if (request.feedback) transaction_.open(*request.feedback, request.keys);
  try {
    keep(request, decision);
    program_.bind(original_, {decision.method, algorithm_}, transaction_.is_open(), *this);
    program_.label(take_label(request));
    original_.codec_label = codec_label_;
    if (decision.method != Method::kPlan)
      feedback_.bind(program_.counts(), original_.keys, transaction_);
    finite_ = true;
    vote_.taken = false;
    if (decision.method == Method::kGather || decision.method == Method::kExchange)
      begin_payloads();
  } catch (...) {
    transaction_.settle(false);
    throw;
  }
}

void CpuDevice::keep(const Request& request, const Decision& decision) {
  original_ = request;
  algorithm_.assign(decision.algorithm);
  original_.algorithm = algorithm_;
  const auto copy = [](auto& kept, auto& span) {
    kept.assign(span.begin(), span.end());
    span = kept;
  };
  copy(inputs_, original_.inputs);
  copy(outputs_, original_.outputs);
  copy(shapes_, original_.shapes);
  copy(keys_, original_.keys);
  if (!transaction_.is_open()) original_.keys = {};
  original_.feedback = nullptr;  // whoever calls bind() keeps it alive
}

// Makes the label, unless it is still the last one. The phases move bytes and factors, so only
// their label tells ranks that may disagree what they are phases of.
std::string_view CpuDevice::take_label(const Request& request) {
  Fnv1a counts;
  for (std::uint64_t each : program_.counts()) counts.number(each);
  Fnv1a all;
  all.number(static_cast<std::uint64_t>(request.collective))
      .number(static_cast<std::uint64_t>(request.op));
  all.number(static_cast<std::uint64_t>(request.root)).number(counts.digest());
  all.bytes(request.codec_label.data(), request.codec_label.size());
  const bool feeds_back = feeds_back_together(request, program_.decision().method);
  all.number(feeds_back ? 1 : 0);
  if (!label_.empty() && all.digest() == labelled_digest_ && request.codec == labelled_)
    return label_;
  OpSpec spec = spec_of(request);
  spec.schedule_digest = 0;
  spec.counts = program_.counts();
  spec.algorithm = "auto";
  if (feeds_back) spec.codec += " with error feedback";
  codec_label_ = spec.codec;
  labelled_digest_ = all.digest();
  labelled_ = request.codec;
  return label_ = spec.codec + ", for " + spec.to_string();
}

void CpuDevice::prepare() {
  const codec::FloatEnvironment environment;
  program_.prepare(*this);
}

const Request& CpuDevice::probe() {
  switch (program_.decision().method) {
    case Method::kLowRank:
      return program_.sum_of_lefts();
    case Method::kGather:
    case Method::kExchange:
      return payloads_.lengths(0);
    default:
      return original_;
  }
}

// ---- By the driver -----------------------------------------------------------------------------

const Request* CpuDevice::next(const Progress& progress) {
  operation_ = progress.operation;
  finite_ = finite_ && progress.finite;
  return program_.next(*this);
}

const Request* CpuDevice::vote() {
  vote_.taken = true;
  vote_.all_finite = std::byte{finite_};
  vote_.request = program_.phase(Collective::kAllReduce, DType::kUInt8, ReduceOp::kMin);
  vote_.request.inputs = vote_.request.outputs = {&vote_.array, 1};
  return &vote_.request;
}

// Where ranks hold different results, or none, that are not all finite, all of them become NaN; so
// do products of factors that are not finite.
void CpuDevice::finish() {
  if (original_.payloads) return return_payloads();
  if (vote_.taken) finite_ = vote_.all_finite != std::byte{0};
  if (!finite_ && (vote_.taken || program_.decision().method == Method::kLowRank))
    for (const Array& each : outputs_)
      std::fill_n(reinterpret_cast<float*>(each.data), each.count,
                  std::numeric_limits<float>::quiet_NaN());
  transaction_.settle(finite_);
}

void CpuDevice::deliver(std::span<const SummedArray> arrays) {
  const Stopwatch stopwatch(spent_.encode);
  for (const SummedArray& each : arrays) {
    if (each.y != each.x && each.count > 0) std::memcpy(each.y, each.x, each.count * sizeof(float));
    feedback_.deliver(each.index, each.y);
  }
}

void CpuDevice::mark(std::span<const SummedArray> arrays) {
  for (const SummedArray& each : arrays)
    finite_ = codec::mark_not_finite(*original_.codec, each.y, each.count) && finite_;
}

void CpuDevice::average(std::span<const SummedArray> arrays) {
  for (const SummedArray& each : arrays)
    codec::average(DType::kFloat32, each.y, original_.size, each.count);
}

}  // namespace gradwire::exec
