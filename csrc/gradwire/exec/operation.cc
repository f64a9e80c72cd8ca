#include "gradwire/exec/operation.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "gradwire/base/error.h"
#include "gradwire/codec/simd.h"

namespace gradwire::exec {
namespace {

std::size_t at(Rank rank) { return static_cast<std::size_t>(rank); }

[[noreturn]] void refuse(const Request& request, const std::string& what) {
  throw InvalidArgument(std::string(name_of(request.collective)) + ": " + what);
}

void require_equal_counts(const Request& request) {
  const auto& in = request.inputs;
  const auto& out = request.outputs;
  if (in.size() != out.size())
    refuse(request, "needs as many output arrays as input arrays, got " +
                        std::to_string(out.size()) + " and " + std::to_string(in.size()));
  for (std::size_t i = 0; i < in.size(); ++i)
    if (in[i].count != out[i].count)
      refuse(request, "output array " + std::to_string(i) + " has " + std::to_string(out[i].count) +
                          " elements, its input " + std::to_string(in[i].count));
}

// One side is a block for each rank, the other one array, as long as this rank's block.
void require_blocks(const Request& request, std::span<const Array> blocks, const char* which,
                    Rank rank, int size) {
  if (blocks.size() != at(size))
    refuse(request, std::string("needs one ") + which + " block for each of the " +
                        std::to_string(size) + " ranks, got " + std::to_string(blocks.size()));
  const bool blocks_are_inputs = blocks.data() == request.inputs.data();
  const auto& other = blocks_are_inputs ? request.outputs : request.inputs;
  const std::size_t own = other.size() == 1 ? 0 : at(rank);
  if (other[own].count != blocks[at(rank)].count)
    refuse(request, std::string("this rank's ") + which + " block has " +
                        std::to_string(blocks[at(rank)].count) +
                        " elements, the array on the other side " +
                        std::to_string(other[own].count));
}

void require_one(const Request& request, std::span<const Array> arrays, const char* which) {
  if (arrays.size() != 1)
    refuse(request,
           std::string("needs one ") + which + " array, got " + std::to_string(arrays.size()));
}

// A walk over keys that lie end to end.
class KeyWalk {
 public:
  explicit KeyWalk(std::span<const codec::KeyedExtent> keys) : keys_(keys) {}

  // Past those of the next `most` elements that are of one key; beyond the last one, past all.
  std::uint64_t step(std::uint64_t most) {
    for (; !keys_.empty() && used_ == keys_.front().count; used_ = 0) keys_ = keys_.subspan(1);
    const std::uint64_t run = keys_.empty() ? most : std::min(most, keys_.front().count - used_);
    used_ += run;
    return run;
  }

 private:
  std::span<const codec::KeyedExtent> keys_;
  std::uint64_t used_ = 0;  // of the first one
};

std::size_t most_runs(const Request& request) {
  KeyWalk keys(request.keys);
  std::size_t most = 1;
  for (const Array& block : request.inputs) {
    std::size_t runs = 0;
    for (std::uint64_t left = block.count; left > 0; ++runs) left -= keys.step(left);
    most = std::max(most, runs);
  }
  return most;
}

void append_runs(const Request& request, std::vector<std::uint64_t>& out) {
  KeyWalk keys(request.keys);
  const std::size_t runs = most_runs(request);
  for (const Array& block : request.inputs) {
    std::uint64_t left = block.count;
    for (std::size_t i = 0; i < runs; ++i) {
      out.push_back(keys.step(left));
      left -= out.back();
    }
  }
}

}  // namespace

void Operation::check(const Request& request, Rank rank, int size) {
  const auto& in = request.inputs;
  const auto& out = request.outputs;
  const bool root = rank == request.root;
  switch (request.collective) {
    case Collective::kAllReduce:
      return require_equal_counts(request);
    case Collective::kReduce:
      if (root) require_equal_counts(request);
      return;
    case Collective::kBroadcast:
      if (root) require_equal_counts(request);
      return;
    case Collective::kReduceScatter:
      require_one(request, out, "output");
      return require_blocks(request, in, "input", rank, size);
    case Collective::kAllGather:
      require_one(request, in, "input");
      return require_blocks(request, out, "output", rank, size);
    case Collective::kGather:
      require_one(request, in, "input");
      if (root) require_blocks(request, out, "output", rank, size);
      return;
    case Collective::kScatter:
      require_one(request, out, "output");
      if (root) require_blocks(request, in, "input", rank, size);
      return;
    case Collective::kAllToAll:
      if (out.size() != in.size()) refuse(request, "needs as many output blocks as input blocks");
      return require_blocks(request, in, "input", rank, size);
  }
}

void Operation::counts(const Request& request, Rank rank, int size,
                       std::vector<std::uint64_t>& out) {
  out.clear();
  const auto p = at(size);
  auto append = [&out](std::span<const Array> arrays) {
    for (const Array& each : arrays) out.push_back(each.count);
  };
  switch (request.collective) {
    case Collective::kAllReduce:
    case Collective::kReduce:
      return append(request.inputs);
    case Collective::kReduceScatter:
      return append_runs(request, out);
    case Collective::kBroadcast:
    case Collective::kAllGather:
      return append(request.outputs);
    case Collective::kGather:
    case Collective::kScatter: {
      const bool gathers = request.collective == Collective::kGather;
      if (rank == request.root) return append(gathers ? request.outputs : request.inputs);
      out.assign(p, 0);
      out[at(rank)] = (gathers ? request.inputs : request.outputs)[0].count;
      return;
    }
    case Collective::kAllToAll:
      out.assign(p * p, 0);
      for (std::size_t d = 0; d < p; ++d) out[at(rank) * p + d] = request.inputs[d].count;
      for (std::size_t s = 0; s < p; ++s) out[s * p + at(rank)] = request.outputs[s].count;
      return;
  }
}

void Operation::bind(const Request& request, std::shared_ptr<const Plan> plan, Rank rank, int size,
                     codec::ErrorFeedback::Transaction& transaction) {
  plan_ = std::move(plan);
  element_ = size_of(request.dtype);
  extents_.clear();
  before_.clear();
  after_.clear();
  bind_arrays(request, rank, size);
  const bool feeds_back = transaction.is_open();
  if (plan_->lossy() || feeds_back)
    feedback_.bind(plan_->folds() ? plan_->spec().counts : plan_->counts(),
                   feeds_back ? request.keys : decltype(request.keys){}, transaction);
  else
    feedback_.clear();
}

void Operation::bind_arrays(const Request& request, Rank rank, int size) {
  sums_.clear();
  addends_.clear();
  if (plan_->folds()) return bind_fold(request, rank, size);
  switch (request.collective) {
    case Collective::kAllReduce:
    case Collective::kReduce:
    case Collective::kBroadcast:
      return bind_in_place(request, rank);
    case Collective::kReduceScatter:
      return bind_reduce_scatter(request, rank);
    case Collective::kAllGather:
      return bind_all_gather(request, rank);
    case Collective::kGather:
    case Collective::kScatter:
      return bind_blocks(request, rank, size);
    case Collective::kAllToAll:
      return bind_all_to_all(request, rank, size);
  }
}

// The outputs are what is worked on; a rank that keeps no result works on a copy of its inputs.
void Operation::bind_in_place(const Request& request, Rank rank) {
  const bool bystander = request.collective == Collective::kReduce && rank != request.root;
  std::byte* next = bystander ? scratch(request.inputs) : nullptr;
  const std::size_t arrays = bystander ? request.inputs.size() : request.outputs.size();
  for (std::size_t i = 0; i < arrays; ++i) {
    std::byte* data = bystander ? next : request.outputs[i].data;
    extents_.push_back(data);
    if (i < request.inputs.size()) add_copy(before_, data, request.inputs[i]);
    if (bystander) next += request.inputs[i].count * element_;
  }
}

// A block of scratch for the inputs of each rank.
void Operation::bind_fold(const Request& request, Rank rank, int size) {
  sums_.assign(request.outputs.begin(), request.outputs.end());
  const std::size_t bytes = plan_->counts()[0] * element_;
  std::byte* next = scratch(bytes * at(size));
  for (Rank r = 0; r < size; ++r) extents_.push_back(next + at(r) * bytes);
  next = extents_[at(rank)];
  for (const Array& each : request.inputs) {
    addends_.push_back(next);
    add_copy(before_, next, each);
    next += each.count * element_;
  }
}

void Operation::bind_reduce_scatter(const Request& request, Rank rank) {
  std::byte* next = scratch(request.inputs);
  for (std::uint64_t count : plan_->counts()) {
    extents_.push_back(next);
    next += count * element_;
  }
  const std::size_t runs = extents_.size() / request.inputs.size();  // of each block
  for (std::size_t i = 0; i < request.inputs.size(); ++i)
    add_copy(before_, extents_[i * runs], request.inputs[i]);
  add_copy(after_, request.outputs[0].data, {extents_[at(rank) * runs], request.outputs[0].count});
}

void Operation::bind_all_gather(const Request& request, Rank rank) {
  for (const Array& each : request.outputs) extents_.push_back(each.data);
  add_copy(before_, extents_[at(rank)], request.inputs[0]);
}

void Operation::bind_blocks(const Request& request, Rank rank, int size) {
  const bool gathers = request.collective == Collective::kGather;
  const auto& whole = gathers ? request.outputs : request.inputs;
  const auto& own = gathers ? request.inputs : request.outputs;
  if (rank != request.root) {
    extents_.assign(at(size), nullptr);
    extents_[at(rank)] = own[0].data;
    return;
  }
  for (const Array& each : whole) extents_.push_back(each.data);
  if (gathers)
    add_copy(before_, extents_[at(rank)], own[0]);
  else
    add_copy(before_, own[0].data, whole[at(rank)]);
}

void Operation::bind_all_to_all(const Request& request, Rank rank, int size) {
  const auto p = at(size);
  extents_.assign(p * p, nullptr);
  for (std::size_t d = 0; d < p; ++d) extents_[at(rank) * p + d] = request.inputs[d].data;
  for (std::size_t s = 0; s < p; ++s)
    if (s != at(rank)) extents_[s * p + at(rank)] = request.outputs[s].data;
  add_copy(before_, request.outputs[at(rank)].data, request.inputs[at(rank)]);
}

void Operation::add_copy(std::vector<CopyStep>& steps, std::byte* to, const Array& from) {
  if (to != from.data && from.count > 0) steps.push_back({to, from.data, from.count * element_});
}

std::byte* Operation::scratch(std::span<const Array> arrays) {
  std::size_t bytes = 0;
  for (const Array& each : arrays) bytes += each.count * element_;
  return scratch(bytes);
}

std::byte* Operation::scratch(std::size_t bytes) {
  if (scratch_.size() < bytes) scratch_.resize(bytes);
  return scratch_.data();
}

void Operation::copy(const std::vector<CopyStep>& steps) {
  for (const CopyStep& each : steps) std::memmove(each.to, each.from, each.bytes);
}

void Operation::begin() {
  copy(before_);
  if (!plan_->lossy()) return deliver_residuals();
  for (std::size_t i = 0; i < extents_.size(); ++i) feedback_.prepare(plan_->codec(), i, floats(i));
}

// A plain sum loses nothing.
void Operation::deliver_residuals() const {
  if (!feedback_.feeds_back()) return;
  const auto& own = plan_->folds() ? addends_ : extents_;
  for (std::size_t i = 0; i < own.size(); ++i)
    feedback_.deliver(i, reinterpret_cast<float*>(own[i]));
}

bool Operation::end(bool finite) {
  if (plan_->folds()) fold();
  copy(after_);
  if (plan_->lossy()) feedback_.adapt(plan_->codec());
  if (!feedback_.feeds_back() || plan_->lossy()) return finite;
  return finite && all_finite();
}

// In the order of the ranks, which is the same on all of them.
void Operation::fold() const {
  const OpSpec& spec = plan_->spec();
  const codec::Kernels& kernels = codec::kernels();
  const auto dtype = static_cast<std::size_t>(spec.dtype);
  const auto add = kernels.reduce[dtype][static_cast<std::size_t>(spec.op)];
  std::size_t offset = 0;
  for (const Array& sum : sums_) {
    if (sum.count == 0) continue;
    std::memcpy(sum.data, extents_[0] + offset, sum.count * element_);
    for (std::size_t r = 1; r < extents_.size(); ++r)
      add(sum.data, extents_[r] + offset, sum.count);
    if (plan_->factor() != 1) kernels.scale[dtype](sum.data, plan_->factor(), sum.count);
    offset += sum.count * element_;
  }
}

bool Operation::all_finite() const {
  const auto finite = [](std::byte* data, std::uint64_t count) {
    return codec::kernels().finite(reinterpret_cast<float*>(data), count);
  };
  if (plan_->folds())
    return std::ranges::all_of(sums_,
                               [&](const Array& sum) { return finite(sum.data, sum.count); });
  for (std::size_t i = 0; i < extents_.size(); ++i)
    if (!finite(extents_[i], plan_->counts()[i])) return false;
  return true;
}

Execution::Call Operation::call() const {
  Execution::Call call;
  call.plan = plan_.get();
  call.extents = extents_;
  if (!plan_->lossy()) return call;
  call.sites = feedback_.sites();
  return call;
}

}  // namespace gradwire::exec
