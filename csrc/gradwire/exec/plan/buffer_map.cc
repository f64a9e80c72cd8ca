#include "gradwire/exec/plan/buffer_map.h"

namespace gradwire::exec {

void BufferMap::make(const Request& request, const Plan& plan, const Scratch& scratch) {
  element_ = size_of(request.dtype);
  for (auto* each : {&arrays_, &addends_}) each->clear();
  for (auto* each : {&before_, &after_}) each->clear();
  sums_.clear();
  if (plan.folds()) return fold(request, plan, scratch);
  switch (request.collective) {
    case Collective::kAllReduce:
    case Collective::kReduce:
    case Collective::kBroadcast:
      return in_place(request, scratch);
    case Collective::kReduceScatter:
      return reduce_scatter(request, plan, scratch);
    case Collective::kAllGather:
      return all_gather(request);
    case Collective::kGather:
    case Collective::kScatter:
      return blocks(request);
    case Collective::kAllToAll:
      return all_to_all(request);
  }
}

// Maps a collective that works on its outputs in place. A rank that keeps no result works on a copy
// of its inputs.
void BufferMap::in_place(const Request& request, const Scratch& scratch) {
  const bool bystander = request.collective == Collective::kReduce && request.rank != request.root;
  std::byte* next = bystander ? scratch(bytes_of(request.inputs)) : nullptr;
  const std::size_t arrays = bystander ? request.inputs.size() : request.outputs.size();
  for (std::size_t i = 0; i < arrays; ++i) {
    std::byte* data = bystander ? next : request.outputs[i].data;
    arrays_.push_back(data);
    if (i < request.inputs.size()) add_copy(before_, data, request.inputs[i]);
    if (bystander) next += request.inputs[i].count * element_;
  }
}

// Maps a plan that folds: scratch has a block for the inputs of each rank.
void BufferMap::fold(const Request& request, const Plan& plan, const Scratch& scratch) {
  sums_.assign(request.outputs.begin(), request.outputs.end());
  const std::size_t bytes = plan.counts()[0] * element_;
  std::byte* next = scratch(bytes * at(request.size));
  for (Rank r = 0; r < request.size; ++r) arrays_.push_back(next + at(r) * bytes);
  next = arrays_[at(request.rank)];
  for (const Array& each : request.inputs) {
    addends_.push_back(next);
    add_copy(before_, next, each);
    next += each.count * element_;
  }
}

void BufferMap::reduce_scatter(const Request& request, const Plan& plan, const Scratch& scratch) {
  std::byte* next = scratch(bytes_of(request.inputs));
  for (std::uint64_t count : plan.counts()) {
    arrays_.push_back(next);
    next += count * element_;
  }
  const std::size_t per_block = arrays_.size() / request.inputs.size();
  for (std::size_t i = 0; i < request.inputs.size(); ++i)
    add_copy(before_, arrays_[i * per_block], request.inputs[i]);
  const std::size_t arrays = request.outputs.size(), own = at(request.rank) * arrays;
  for (std::size_t i = 0; i < arrays; ++i)
    add_copy(after_, request.outputs[i].data,
             {arrays_[(own + i) * per_block], request.outputs[i].count});
}

void BufferMap::all_gather(const Request& request) {
  for (const Array& each : request.outputs) arrays_.push_back(each.data);
  const std::size_t arrays = request.inputs.size();
  for (std::size_t i = 0; i < arrays; ++i)
    add_copy(before_, arrays_[at(request.rank) * arrays + i], request.inputs[i]);
}

void BufferMap::blocks(const Request& request) {
  const Rank rank = request.rank;
  const bool gathers = request.collective == Collective::kGather;
  const auto& whole = gathers ? request.outputs : request.inputs;
  const auto& own = gathers ? request.inputs : request.outputs;
  if (rank != request.root) {
    arrays_.assign(at(request.size), nullptr);
    arrays_[at(rank)] = own[0].data;
    return;
  }
  for (const Array& each : whole) arrays_.push_back(each.data);
  if (gathers)
    add_copy(before_, arrays_[at(rank)], own[0]);
  else
    add_copy(before_, own[0].data, whole[at(rank)]);
}

void BufferMap::all_to_all(const Request& request) {
  const auto p = at(request.size);
  const Rank rank = request.rank;
  arrays_.assign(p * p, nullptr);
  for (std::size_t d = 0; d < p; ++d) arrays_[at(rank) * p + d] = request.inputs[d].data;
  for (std::size_t s = 0; s < p; ++s)
    if (s != at(rank)) arrays_[s * p + at(rank)] = request.outputs[s].data;
  add_copy(before_, request.outputs[at(rank)].data, request.inputs[at(rank)]);
}

void BufferMap::add_copy(std::vector<CopyStep>& steps, std::byte* to, const Array& from) {
  if (to != from.data && from.count > 0) steps.push_back({to, from.data, from.count * element_});
}

std::size_t BufferMap::bytes_of(std::span<const Array> arrays) const {
  std::size_t bytes = 0;
  for (const Array& each : arrays) bytes += each.count * element_;
  return bytes;
}

}  // namespace gradwire::exec
