#include "gradwire/exec/compound/compound.h"

#include <algorithm>
#include <limits>

#include "gradwire/base/error.h"
#include "gradwire/exec/compound/agreed.h"
#include "gradwire/exec/compound/exchange.h"
#include "gradwire/exec/compound/gather_reduce.h"
#include "gradwire/exec/compound/lowrank_reduce.h"
#include "gradwire/exec/plan/gather_algorithm.h"

namespace gradwire::exec {

void Compound::bind(const Request& request, Rank rank, int size) {
  if (request.feedback) transaction_.open(*request.feedback, request.keys);
  whole_ = request;
  rank_ = rank;
  size_ = size;
  algorithm_.assign(request.algorithm);
  whole_.algorithm = algorithm_;
  extent_counts(request, rank, size, counts_);
  take_label(request);
  const auto keep = [](auto& kept, auto& span) {
    kept.assign(span.begin(), span.end());
    span = kept;
  };
  keep(inputs_, whole_.inputs);
  keep(outputs_, whole_.outputs);
  keep(shapes_, whole_.shapes);
  keep(keys_, whole_.keys);
  if (!transaction_.is_open()) whole_.keys = {};
  whole_.feedback = nullptr;  // whoever binds keeps it
  try {
    begin();
  } catch (...) {
    transaction_.settle(false);
    throw;
  }
}

// The phases move bytes and factors: it is their label that says, to ranks that may disagree, what
// they are phases of. Made only when it is another.
void Compound::take_label(const Request& request) {
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
  if (!label_.empty() && all.digest() == labelled_digest_ && request.codec == labelled_) return;
  spec.counts = counts_;
  spec.algorithm = "auto";
  spec.codec = request.codec_label;
  if (spec.codec.empty()) spec.codec = request.codec ? request.codec->name() : "none";
  label_ = spec.codec + ", for " + spec.to_string();
  labelled_digest_ = all.digest();
  labelled_ = request.codec;
}

Request Compound::phase(Collective collective, DType dtype, ReduceOp op) const {
  Request request;
  request.collective = collective;
  request.dtype = dtype;
  request.op = op;
  request.timeout = whole_.timeout;
  request.codec_label = label_;
  return request;
}

const Request* Compound::ask_all(bool finite) {
  finite_ = std::byte{finite};
  question_ = phase(Collective::kAllReduce, DType::kUInt8, ReduceOp::kMin);
  question_.inputs = question_.outputs = {&answer_, 1};
  return &question_;
}

void Compound::settle_agreed() {
  if (finite_ == std::byte{0}) return refuse_results();
  transaction_.settle(true);
}

void Compound::refuse_results() {
  for (const Array& each : outputs_)
    std::fill_n(reinterpret_cast<float*>(each.data), each.count,
                std::numeric_limits<float>::quiet_NaN());
  transaction_.settle(false);
}

namespace {

// Where not all want the sum, a schedule sends less than all payloads to all, and encodes as
// seldom.
bool is_best_gathered(const Request& request, int size) {
  if (request.algorithm != "auto" || request.schedule != nullptr || !request.codec) return false;
  if (request.codec->combine() == codec::Combine::kGather) return true;
  return request.collective == Collective::kAllReduce && request.codec->gathers(size);
}

}  // namespace

Way way_of(const Request& request, int size) {
  if (request.letters) return Way::kExchange;
  if (request.codec && request.codec->combine() == codec::Combine::kCompound) return Way::kLowRank;
  const bool shared = request.collective == Collective::kAllReduce;
  const bool plain = !request.codec || request.codec->combine() == codec::Combine::kPlain;
  const bool gathers = is_gather(request.algorithm) && !(plain && shared);  // those are one phase
  if (gathers || is_best_gathered(request, size)) return Way::kGather;
  return request.feedback && !shared ? Way::kAgreed : Way::kAtOnce;
}

std::unique_ptr<Compound> make_compound(Way way) {
  switch (way) {
    case Way::kAgreed:
      return std::make_unique<Agreed>();
    case Way::kGather:
      return std::make_unique<GatherReduce>();
    case Way::kExchange:
      return std::make_unique<Exchange>();
    case Way::kLowRank:
      return std::make_unique<LowRankReduce>();
    case Way::kAtOnce:
      break;
  }
  throw InvalidArgument("this codec is not there yet");
}

}  // namespace gradwire::exec
