#include "gradwire/exec/compound/compound.h"

#include <algorithm>
#include <limits>

#include "gradwire/base/error.h"
#include "gradwire/exec/compound/agreed_reduce.h"
#include "gradwire/exec/compound/exchange.h"
#include "gradwire/exec/compound/gather_reduce.h"
#include "gradwire/exec/compound/lowrank_reduce.h"
#include "gradwire/exec/plan/gather_algorithm.h"

namespace gradwire::exec {

namespace {

// Returns whether the ranks must all feed back or none: those that do have a phase more, or factor
// with what they remember. Elsewhere each rank may keep what it has not delivered, or not.
bool feeds_back_together(const Request& request) {
  const bool factors = request.codec && request.codec->combine() == codec::Combine::kCompound;
  return request.feedback && (factors || request.collective != Collective::kAllReduce);
}

}  // namespace

void CompoundCollective::bind(const Request& request, Rank rank, int size) {
  if (request.feedback) transaction_.open(*request.feedback, request.keys);
  original_ = request;
  rank_ = rank;
  size_ = size;
  algorithm_.assign(request.algorithm);
  original_.algorithm = algorithm_;
  extent_counts(request, rank, size, counts_);
  take_label(request);
  original_.codec_label = codec_label_;
  const auto keep = [](auto& kept, auto& span) {
    kept.assign(span.begin(), span.end());
    span = kept;
  };
  keep(inputs_, original_.inputs);
  keep(outputs_, original_.outputs);
  keep(shapes_, original_.shapes);
  keep(keys_, original_.keys);
  if (!transaction_.is_open()) original_.keys = {};
  original_.feedback = nullptr;  // whoever calls bind() keeps it alive
  try {
    begin();
  } catch (...) {
    transaction_.settle(false);
    throw;
  }
}

// Makes the label, unless it is still the last one. The phases move bytes and factors, so only
// their label tells ranks that may disagree what they are phases of.
void CompoundCollective::take_label(const Request& request) {
  OpSpec spec;
  spec.collective = request.collective;
  spec.dtype = request.dtype;
  spec.op = request.op;
  spec.root = request.root;
  Fnv1a counts;
  for (std::uint64_t each : counts_) counts.number(each);
  Fnv1a all;
  all.number(static_cast<std::uint64_t>(spec.collective))
      .number(static_cast<std::uint64_t>(spec.op));
  all.number(static_cast<std::uint64_t>(spec.root)).number(counts.digest());
  all.bytes(request.codec_label.data(), request.codec_label.size());
  const bool feeds_back = feeds_back_together(request);
  all.number(feeds_back ? 1 : 0);
  if (!label_.empty() && all.digest() == labelled_digest_ && request.codec == labelled_) return;
  spec.counts = counts_;
  spec.algorithm = "auto";
  spec.codec = request.codec_label;
  if (spec.codec.empty()) spec.codec = request.codec ? request.codec->name() : "none";
  if (feeds_back) spec.codec += " with error feedback";
  codec_label_ = spec.codec;
  label_ = spec.codec + ", for " + spec.to_string();
  labelled_digest_ = all.digest();
  labelled_ = request.codec;
}

Request CompoundCollective::phase(Collective collective, DType dtype, ReduceOp op) const {
  Request request;
  request.collective = collective;
  request.dtype = dtype;
  request.op = op;
  request.timeout = original_.timeout;
  request.codec_label = label_;
  return request;
}

const Request* CompoundCollective::vote_finite(bool finite) {
  finite_ = std::byte{finite};
  vote_ = phase(Collective::kAllReduce, DType::kUInt8, ReduceOp::kMin);
  vote_.inputs = vote_.outputs = {&vote_array_, 1};
  return &vote_;
}

void CompoundCollective::settle_vote() {
  if (finite_ == std::byte{0}) return fill_with_nan();
  transaction_.settle(true);
}

void CompoundCollective::fill_with_nan() {
  for (const Array& each : outputs_)
    std::fill_n(reinterpret_cast<float*>(each.data), each.count,
                std::numeric_limits<float>::quiet_NaN());
  transaction_.settle(false);
}

namespace {

// Returns whether "auto" means a gather. A sum that not all ranks want is not gathered: a schedule
// sends fewer bytes, and encodes no more often.
bool is_best_gathered(const Request& request, int size) {
  if (request.algorithm != "auto" || request.schedule != nullptr || !request.codec) return false;
  if (request.codec->combine() == codec::Combine::kGather) return true;
  return request.collective == Collective::kAllReduce && request.codec->gathers(size);
}

}  // namespace

ExecutionPath path_of(const Request& request, int size) {
  if (request.payloads) return ExecutionPath::kExchange;
  if (request.codec && request.codec->combine() == codec::Combine::kCompound)
    return ExecutionPath::kLowRank;
  const bool shared = request.collective == Collective::kAllReduce;
  const bool plain = !request.codec || request.codec->combine() == codec::Combine::kPlain;
  const bool gathers = is_gather(request.algorithm) && !(plain && shared);  // those are one phase
  if (gathers || is_best_gathered(request, size)) return ExecutionPath::kGather;
  return request.feedback && !shared ? ExecutionPath::kAgreed : ExecutionPath::kSingle;
}

std::unique_ptr<CompoundCollective> make_compound(ExecutionPath path) {
  switch (path) {
    case ExecutionPath::kAgreed:
      return std::make_unique<AgreedReduce>();
    case ExecutionPath::kGather:
      return std::make_unique<GatherReduce>();
    case ExecutionPath::kExchange:
      return std::make_unique<Exchange>();
    case ExecutionPath::kLowRank:
      return std::make_unique<LowRankReduce>();
    case ExecutionPath::kSingle:
      break;
  }
  throw InvalidArgument("this codec is not there yet");
}

}  // namespace gradwire::exec
