#include "gradwire/exec/compound/gather_reduce.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "gradwire/base/error.h"
#include "gradwire/codec/feedback/residuals.h"
#include "gradwire/codec/reduction/average.h"
#include "gradwire/exec/plan/gather_algorithm.h"

namespace gradwire::exec {
namespace {

// Returns the size of the table in front of the payloads, which has the length of each extent's
// payload.
std::size_t table_bytes(std::size_t extents) { return extents * sizeof(std::uint32_t); }

}  // namespace

void GatherReduce::begin() {
  const Request& request = original();
  if (!request.codec || request.codec->combine() == codec::Combine::kPlain)
    throw ScheduleError(std::string(name_of(request.collective)) + " by '" +
                        std::string(request.algorithm) + "': without codec only all_reduce " +
                        "gathers; use auto" + (reduces(request.collective) ? ", or a codec" : ""));
  OpSpec spec;
  spec.collective = request.collective;
  spec.dtype = request.dtype;
  spec.op = request.op;
  Plan::check_types(spec, *request.codec);
  phase_ = 0;
  place_extents();
  limit_ = table_bytes(counts().size());
  for (std::uint64_t count : counts()) limit_ += request.codec->max_bytes(count);
  feedback_.bind(counts(), request.keys, transaction());
  Request gather = phase(Collective::kAllGather, DType::kUInt8, ReduceOp::kSum);
  gather.algorithm = gather_algorithm(request);
  payloads_.start(gather, rank(), size());
}

void GatherReduce::place_extents() {
  const std::size_t arrays = original().inputs.size();
  runs_ = arrays == 0 ? 1 : counts().size() / arrays;
  offsets_.assign(counts().size(), 0);
  for (std::size_t i = 1; i < offsets_.size(); ++i)
    if (i % runs_ > 0) offsets_[i] = offsets_[i - 1] + counts()[i - 1];
}

const Request* GatherReduce::next(const Progress& progress) {
  if (size() == 1) return deliver_alone();
  switch (phase_++) {
    case 0:
      return &encode(progress.operation);
    case 1:
      return &payloads_.bytes(limit_);
    case 2:
      return add_up();
    default:
      settle_vote();
      return nullptr;
  }
}

const Request& GatherReduce::encode(std::uint32_t operation) {
  const Stopwatch stopwatch(spent_.encode);
  const codec::Codec& codec = *original().codec;
  std::vector<std::byte>& out = payloads_.own();
  if (out.size() < limit_) out.resize(limit_);
  std::size_t used = table_bytes(counts().size());
  for (std::size_t i = 0; i < counts().size(); ++i) {
    const float* x = input(i);
    feedback_.prepare(codec, i, x);
    const codec::EncodeContext context = feedback_.context(i, rank(), operation);
    const std::size_t size =
        codec::encode(codec, x, counts()[i], context, Bytes(out).subspan(used));
    const auto length = static_cast<std::uint32_t>(size);
    std::memcpy(out.data() + table_bytes(i), &length, sizeof length);
    used += size;
  }
  feedback_.adapt(codec);
  return payloads_.lengths(used);
}

// Adds up the payloads of all ranks. Where all ranks keep all sums, they need no vote: they find
// the same.
const Request* GatherReduce::add_up() {
  const Stopwatch stopwatch(spent_.decode);
  starts_.assign(static_cast<std::size_t>(size()), table_bytes(counts().size()));
  parts_.resize(starts_.size());
  bool finite = true;
  for (std::size_t i = 0; i < counts().size(); ++i) {
    for (Rank r = 0; r < size(); ++r) take_part(r, i);
    if (float* y = output(i)) finite = sum(i, y) && finite;
  }
  check_ends();
  const bool shared = original().collective == Collective::kAllReduce;
  if (!shared && transaction().is_open()) return vote_finite(finite);
  transaction().settle(finite);
  return nullptr;
}

// Takes a rank's part of an extent. Its length is not trusted: it is checked, and loaded once.
void GatherReduce::take_part(Rank from, std::size_t extent) {
  const auto r = static_cast<std::size_t>(from);
  const ConstBytes all = payloads_.of(from);
  std::uint32_t length = 0;
  if (all.size() >= table_bytes(counts().size()))
    std::memcpy(&length, all.data() + table_bytes(extent), sizeof length);
  if (starts_[r] > all.size() || length > all.size() - starts_[r])
    refuse(from, "it is shorter than its parts");
  parts_[r] = all.subspan(starts_[r], length);
  starts_[r] += length;
}

void GatherReduce::check_ends() const {
  for (Rank r = 0; r < size(); ++r)
    if (starts_[static_cast<std::size_t>(r)] != payloads_.of(r).size())
      refuse(r, "it is longer than its parts");
}

// Sums an extent's parts into y. Returns whether the sums are all finite.
bool GatherReduce::sum(std::size_t extent, float* y) {
  try {
    original().codec->decode_sum(parts_, y, counts()[extent]);
  } catch (const InvalidArgument& error) {
    refuse(blame(extent), error.what());
  }
  const bool finite = codec::mark_not_finite(*original().codec, y, counts()[extent]);
  if (original().op == ReduceOp::kAvg) codec::average(DType::kFloat32, y, size(), counts()[extent]);
  return finite;
}

// Returns the rank whose part of an extent cannot be decoded, when it is known that there is one.
Rank GatherReduce::blame(std::size_t extent) const {
  std::vector<float> scratch(counts()[extent]);
  for (Rank r = 0; r < size(); ++r) {
    const ConstBytes part = parts_[static_cast<std::size_t>(r)];
    try {
      if (original().codec->decode(part, scratch.data(), scratch.size()).bytes != part.size())
        return r;
    } catch (const InvalidArgument&) {
      return r;
    }
  }
  return rank();
}

void GatherReduce::refuse(Rank from, const std::string& why) const {
  throw TransportError("rank " + std::to_string(rank()) + ": rank " + std::to_string(from) +
                           " sent a payload that can't be decoded: " + why,
                       from);
}

// Delivers the input with its whole residual: a single rank loses nothing to encoding.
const Request* GatherReduce::deliver_alone() {
  bool finite = true;
  for (std::size_t i = 0; i < counts().size(); ++i) {
    float* y = output(i);
    if (y != input(i) && counts()[i] > 0) std::memcpy(y, input(i), counts()[i] * sizeof(float));
    feedback_.deliver(i, y);
    finite = codec::mark_not_finite(*original().codec, y, counts()[i]) && finite;
  }
  transaction().settle(finite);
  return nullptr;
}

const float* GatherReduce::input(std::size_t extent) const {
  const Array& array = original().inputs[extent / runs_];
  return reinterpret_cast<const float*>(array.data) + offsets_[extent];
}

// Returns where this rank keeps an extent's sum; null where other ranks keep it.
float* GatherReduce::output(std::size_t extent) const {
  const Request& request = original();
  std::size_t array = extent / runs_;
  if (request.collective == Collective::kReduce && rank() != request.root) return nullptr;
  if (request.collective == Collective::kReduceScatter) {
    if (array != static_cast<std::size_t>(rank())) return nullptr;
    array = 0;
  }
  return reinterpret_cast<float*>(request.outputs[array].data) + offsets_[extent];
}

}  // namespace gradwire::exec
