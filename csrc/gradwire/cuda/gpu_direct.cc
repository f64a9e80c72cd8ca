#include "gradwire/cuda/gpu_direct.h"

#include <algorithm>

namespace gradwire::cuda {
namespace {

void append(const exec::Plan& plan, const exec::Frame& frame, std::vector<exec::Span>& spans) {
  for (const exec::Chunk& chunk : plan.chunks(frame)) {
    const auto its = plan.spans(chunk);
    spans.insert(spans.end(), its.begin(), its.end());
  }
}

}  // namespace

DirectExchange::DirectExchange(const Api& api, Rank rank, int size)
    : rank_(rank), size_(size), payloads_(api), received_(api), chunks_(at(size)) {}

bool DirectExchange::can_run(const GpuExecution::GpuCall& call, const Messages& messages) const {
  const OpSpec& spec = call.plan->spec();
  return size_ > 1 && call.codec != nullptr && messages.has_collectives() &&
         spec.schedule_digest == 0 && spec.algorithm == "direct" &&
         spec.collective == Collective::kAllReduce;
}

void DirectExchange::run(const GpuExecution::GpuCall& call, Messages& messages,
                         const CallStream& stream) {
  find_chunks(*call.plan);
  list_spans(call);
  if (chunk_bytes_ == 0) return;
  std::byte* const all = payloads_.take(chunk_bytes_ * at(size_), stream);
  received_.take(chunk_bytes_ * at(size_), stream);
  const float factor = static_cast<float>(1.0 / call.plan->divisor());
  NativeCollective step{Collective::kAllToAll, DType::kUInt8, ReduceOp::kSum, 0, all,
                        received_.data(),      chunk_bytes_};

  call.codec->encode(others_, {.out = all}, call.scratch, call.flags, stream);
  messages.run_native({&step, 1}, stream);
  if (!own_.empty())
    call.codec->encode(own_,
                       {.received = received(), .out = all, .finishes = true, .factor = factor},
                       call.scratch, call.flags, stream);
  step.collective = Collective::kAllGather;
  step.input = all + at(rank_) * chunk_bytes_;
  step.output = all;
  messages.run_native({&step, 1}, stream);
  call.codec->decode(others_, {.payloads = {all, 0, 1}, .factor = factor}, call.flags, stream);
  sent_ += 2 * chunk_bytes_ * at(size_ - 1);
}

// In the first round each peer is sent the chunk that it owns, and sends this rank's.
void DirectExchange::find_chunks(const exec::Plan& plan) {
  for (auto& each : chunks_) each.clear();
  for (const exec::Frame& each : plan.sends())
    if (each.round == 0) append(plan, each, chunks_[at(plan.peers(each)[0])]);
  for (const exec::Frame& each : plan.receives())
    if (each.round == 0 && chunks_[at(rank_)].empty()) append(plan, each, chunks_[at(rank_)]);
}

// Lists the spans of all chunks, with the places of their payloads.
void DirectExchange::list_spans(const GpuExecution::GpuCall& call) {
  own_.clear();
  others_.clear();
  chunk_bytes_ = 0;
  for (Rank owner = 0; owner < size_; ++owner) {
    std::size_t bytes = 0;
    for (const exec::Span& span : chunks_[at(owner)]) {
      auto& spans = owner == rank_ ? own_ : others_;
      spans.push_back(span_of(call, span));
      spans.back().payload = spans.back().received = bytes;
      bytes += call.codec->payload_bytes(span.count);
    }
    chunk_bytes_ = std::max(chunk_bytes_, bytes);
  }
  for (GpuSpan& each : own_) each.payload += at(rank_) * chunk_bytes_;
  auto next = others_.begin();
  for (Rank owner = 0; owner < size_; ++owner)
    for (std::size_t i = 0; owner != rank_ && i < chunks_[at(owner)].size(); ++i)
      (next++)->payload += at(owner) * chunk_bytes_;
}

// Lists what came in the order in which `direct` adds: from the rank before this one, from the one
// before that, and so on; rank 0 is followed by the last one.
GpuPayloads DirectExchange::received() const {
  const auto bytes = static_cast<std::int64_t>(chunk_bytes_);
  const std::byte* const first =
      received_.data() + at(rank_ == 0 ? size_ - 1 : rank_ - 1) * chunk_bytes_;
  GpuPayloads found{first, -bytes, size_ - 1};
  if (rank_ > 0) {
    found.turn = rank_;
    found.jump = bytes * size_;
  }
  return found;
}

}  // namespace gradwire::cuda
