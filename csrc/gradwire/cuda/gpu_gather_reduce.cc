#include "gradwire/cuda/gpu_gather_reduce.h"

#include "gradwire/base/error.h"
#include "gradwire/exec/plan/gather_algorithm.h"

namespace gradwire::cuda {

GatherReduce::GatherReduce(Communicator& of)
    : of_(of),
      operation_(of.api_, {of.setting_.rank, of.setting_.size, of.messages_.get(), &of.plans_}),
      payloads_(of.api_) {}

void GatherReduce::run(Call& call) {
  const exec::Request& request = *call.request;
  const std::string_view algorithm = exec::gather_algorithm(request);
  of_.begin(call);
  place(call);
  of_.bind_feedback(call);
  if (of_.setting_.size == 1) return deliver_alone(call);
  std::byte* const blocks =
      payloads_.take(block_bytes_ * static_cast<std::size_t>(of_.setting_.size), call.captured);
  std::vector<exec::Array> outputs;
  for (int r = 0; r < of_.setting_.size; ++r)
    outputs.push_back({blocks + static_cast<std::size_t>(r) * block_bytes_, block_bytes_});
  const exec::Array own = outputs[static_cast<std::size_t>(of_.setting_.rank)];
  exec::Request gather;
  gather.collective = Collective::kAllGather;
  gather.dtype = DType::kUInt8;
  gather.algorithm = algorithm;
  gather.inputs = {&own, 1};
  gather.outputs = outputs;
  operation_.bind(gather, call.captured);
  list_runs(call);
  for (const Run& each : all_runs_) call.codec->prepare(each, call.scratch, call.stream);
  call.codec->encode(all_runs_, {.out = own.data}, call.scratch, call.flags, call.stream);
  of_.adapt(call);
  operation_.begin(call.stream);
  operation_.run({}, layout_, call.stream);
  add_up(call);
  if (call.feedback != nullptr) of_.settle(call, request.collective == Collective::kAllReduce);
}

// Places the payloads end to end, as the extents are.
void GatherReduce::place(const Call& call) {
  const std::size_t arrays = call.request->inputs.size();
  runs_ = arrays == 0 ? 1 : call.counts.size() / arrays;
  offsets_.assign(call.counts.size(), 0);
  layout_.clear();
  block_bytes_ = 0;
  for (std::size_t i = 0; i < call.counts.size(); ++i) {
    if (i % runs_ > 0) offsets_[i] = offsets_[i - 1] + call.counts[i - 1];
    block_bytes_ += call.codec->payload_bytes(call.counts[i]);
    if (call.codec->slot_bytes() > 0) layout_.push_back(call.codec->layout(call.counts[i]));
  }
}

// Lists the inputs, and where their payloads begin in a block.
void GatherReduce::list_runs(const Call& call) {
  all_runs_.clear();
  std::uint64_t payload = 0;
  for (std::size_t i = 0; i < call.counts.size(); ++i) {
    Run run;
    run.x = input(call, i);
    run.n = call.counts[i];
    run.run_feedback = call.extent_feedback[i].run_feedback;
    run.call = call.extent_feedback[i].call;
    run.element = call.extent_feedback[i].element;
    run.payload = payload;
    all_runs_.push_back(run);
    payload += call.codec->payload_bytes(run.n);
  }
}

// Lists the sums that this rank holds.
void GatherReduce::list_results(const Call& call) {
  results_.clear();
  for (std::size_t i = 0; i < call.counts.size(); ++i)
    if (float* const y = output(call, i)) {
      results_.push_back(all_runs_[i]);
      results_.back().y = y;
    }
}

// Adds up the payloads, and averages. A unit that is not finite is none before and after that.
void GatherReduce::add_up(const Call& call) {
  list_results(call);
  const bool averages = call.request->op == ReduceOp::kAvg;
  Decoding how;
  how.payloads = {payloads_.data(), static_cast<std::int64_t>(block_bytes_), of_.setting_.size};
  how.factor = averages ? static_cast<float>(1.0 / of_.setting_.size) : 1;
  call.codec->decode(results_, how, call.flags, call.stream);
  mark(call);
}

// Copies input to output where there is one rank, which loses nothing, and delivers the residuals.
void GatherReduce::deliver_alone(const Call& call) {
  list_runs(call);
  list_results(call);
  for (const Run& each : results_)
    if (each.y != each.x && call.feedback == nullptr)
      check(of_.api_, of_.api_.copy(each.y, each.x, 4 * each.n, CopyKind::kOnDevice, call.stream),
            "cudaMemcpyAsync");
  if (call.feedback != nullptr)
    check(of_.api_,
          of_.api_.deliver_runs(results_.data(), static_cast<int>(results_.size()), call.stream),
          "delivering");
  mark(call);
  if (call.feedback != nullptr) of_.settle(call, /*shared=*/true);
}

void GatherReduce::mark(const Call& call) {
  check(of_.api_,
        of_.api_.mark_runs(results_.data(), static_cast<int>(results_.size()),
                           call.request->codec->unit(), call.flags, call.stream),
        "marking");
}

const float* GatherReduce::input(const Call& call, std::size_t extent) const {
  const exec::Array& array = call.request->inputs[extent / runs_];
  return reinterpret_cast<const float*>(array.data) + offsets_[extent];
}

// Returns the place of an extent's sum on this rank; null where other ranks hold it.
float* GatherReduce::output(const Call& call, std::size_t extent) const {
  const exec::Request& request = *call.request;
  std::size_t array = extent / runs_;
  if (request.collective == Collective::kReduce && of_.setting_.rank != request.root)
    return nullptr;
  if (request.collective == Collective::kReduceScatter) {
    if (array != static_cast<std::size_t>(of_.setting_.rank)) return nullptr;
    array = 0;
  }
  return reinterpret_cast<float*>(request.outputs[array].data) + offsets_[extent];
}

}  // namespace gradwire::cuda
