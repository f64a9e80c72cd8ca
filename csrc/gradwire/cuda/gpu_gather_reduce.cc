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
  std::byte* out = own.data;
  for (std::size_t i = 0; i < call.counts.size(); ++i) {
    Run run{input(call, i), call.counts[i], call.extent_feedback[i].run_feedback,
            call.extent_feedback[i].call, call.extent_feedback[i].element};
    call.codec->prepare(run, call.scratch, call.stream);
    call.codec->encode(run, out, call.scratch, call.stream);
    out += call.codec->payload_bytes(call.counts[i]);
  }
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

void GatherReduce::add_up(const Call& call) {
  const auto size = static_cast<std::size_t>(of_.setting_.size);
  std::vector<const std::byte*> payloads(size);
  for (std::size_t r = 0; r < size; ++r) payloads[r] = payloads_.data() + r * block_bytes_;
  for (std::size_t i = 0; i < call.counts.size(); ++i) {
    if (float* y = output(call, i)) {
      call.codec->decode_sum(payloads, y, call.counts[i], call.flags, call.stream);
      mark(call, i, y);
      if (call.request->op == ReduceOp::kAvg)
        check(of_.api_,
              of_.api_.average(static_cast<int>(DType::kFloat32), y, of_.setting_.size,
                               call.counts[i], call.stream),
              "averaging");
    }
    for (const std::byte*& each : payloads) each += call.codec->payload_bytes(call.counts[i]);
  }
}

// Copies input to output where there is one rank, which loses nothing, and delivers the residuals.
void GatherReduce::deliver_alone(const Call& call) {
  for (std::size_t i = 0; i < call.counts.size(); ++i) {
    float* const y = output(call, i);
    if (y != input(call, i))
      check(of_.api_,
            of_.api_.copy(y, input(call, i), 4 * call.counts[i], CopyKind::kOnDevice, call.stream),
            "cudaMemcpyAsync");
    if (call.feedback != nullptr)
      check(of_.api_,
            of_.api_.deliver(call.extent_feedback[i].run_feedback, y, call.counts[i], call.stream),
            "delivering");
    mark(call, i, y);
  }
  if (call.feedback != nullptr) of_.settle(call, /*shared=*/true);
}

void GatherReduce::mark(const Call& call, std::size_t extent, float* y) {
  check(of_.api_,
        of_.api_.mark(y, call.counts[extent], call.request->codec->unit(), call.flags, call.stream),
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
