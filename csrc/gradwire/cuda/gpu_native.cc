#include "gradwire/cuda/gpu_native.h"

#include <algorithm>
#include <utility>

#include "gradwire/base/error.h"

namespace gradwire::cuda {
namespace {

bool has_type(DType dtype) {
  return dtype != DType::kInt16 && dtype != DType::kUInt16 && dtype != DType::kBool &&
         !is_complex(dtype);
}

bool has_op(ReduceOp op, DType dtype) {
  if (op == ReduceOp::kSum || op == ReduceOp::kProd) return true;
  if (op == ReduceOp::kAvg) return is_floating(dtype);
  // Of floats, NCCL's lose NaN.
  return (op == ReduceOp::kMin || op == ReduceOp::kMax) && !is_floating(dtype);
}

bool is_16_bit_float(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBFloat16; }

bool has_blocks(Collective collective) {
  return collective == Collective::kReduceScatter || collective == Collective::kAllGather;
}

// The p blocks of reduce_scatter's inputs and all_gather's outputs.
std::span<const exec::Array> blocks_of(const exec::Request& request) {
  return request.collective == Collective::kReduceScatter ? request.inputs : request.outputs;
}

bool are_alike(std::span<const exec::Array> blocks) {
  return std::ranges::all_of(
      blocks, [&](const exec::Array& each) { return each.count == blocks.front().count; });
}

bool are_one_array(std::span<const exec::Array> blocks, std::size_t block_bytes) {
  for (std::size_t i = 1; i < blocks.size(); ++i)
    if (blocks[i].data != blocks[i - 1].data + block_bytes) return false;
  return true;
}

std::string why_no_collective(const exec::Request& request, int size, const Feedback* feedback) {
  switch (request.collective) {
    case Collective::kAllReduce:
    case Collective::kBroadcast:
      return "";
    case Collective::kReduce:
      return feedback == nullptr ? "" : "it delivers residuals in all_reduce only";
    case Collective::kReduceScatter:
    case Collective::kAllGather:
      if (feedback != nullptr) return "it delivers residuals in all_reduce only";
      return std::cmp_equal(blocks_of(request).size(), size) && are_alike(blocks_of(request))
                 ? ""
                 : "it has that of one array in equal blocks";
    default:
      return "it has no " + std::string(name_of(request.collective));
  }
}

// Returns why a call cannot be made by native collectives; empty if it can. It may look only at
// what is the same on all ranks.
std::string why_not(const exec::Request& request, int size, const Feedback* feedback) {
  if (request.codec && request.codec->combine() != codec::Combine::kPlain)
    return "it sends no codec's payloads";
  if (!has_type(request.dtype)) return "it has no " + std::string(name_of(request.dtype));
  if (reduces(request.collective) && !has_op(request.op, request.dtype))
    return "it has no " + std::string(name_of(request.op)) + " of " +
           std::string(name_of(request.dtype)) + " as gradwire defines it";
  return why_no_collective(request, size, feedback);
}

// Of those that a rank sends in a ring.
std::uint64_t ring_bytes(const NativeCollective& collective, int size) {
  const auto p = static_cast<std::uint64_t>(size);
  const std::uint64_t bytes = collective.count * size_of(collective.dtype);
  if (collective.collective == Collective::kAllReduce) return 2 * bytes * (p - 1) / p;
  return has_blocks(collective.collective) ? bytes * (p - 1) : bytes;
}

}  // namespace

bool is_native(const exec::Request& request, int size, const Messages& messages,
               const Feedback* feedback) {
  if (request.schedule != nullptr || size == 1) return false;
  if (request.algorithm == "auto")
    return messages.has_collectives() && why_not(request, size, feedback).empty() &&
           // Schedules add them in float32.
           !(is_16_bit_float(request.dtype) && reduces(request.collective));
  if (request.algorithm != kNcclAlgorithm) return false;
  const std::string why = messages.has_collectives() ? why_not(request, size, feedback)
                                                     : "messages between these GPUs go over " +
                                                           std::string(messages.name());
  if (why.empty()) return true;
  throw ScheduleError(std::string(name_of(request.collective)) +
                      " by 'nccl', its own collective: " + why + "; use auto");
}

NativeCall::NativeCall(Communicator& of) : of_(of), scratch_(of.api_) {}

void NativeCall::run(Call& call) {
  const bool has_residuals = call.feedback != nullptr;
  bind(call);
  if (has_residuals) deliver_residuals(call);
  if (call.request->collective == Collective::kReduceScatter)
    copy_blocks(call, call.request->inputs, /*in=*/true);
  if (!collectives_.empty()) of_.messages_->run_native(collectives_, call.stream);
  for (const NativeCollective& each : collectives_) sent_ += ring_bytes(each, of_.setting_.size);
  if (call.request->collective == Collective::kAllGather)
    copy_blocks(call, call.request->outputs, /*in=*/false);
  if (has_residuals) check_results(call);
}

void NativeCall::bind(const Call& call) {
  const exec::Request& request = *call.request;
  collectives_.clear();
  const NativeCollective collective{
      request.collective, request.dtype, request.op, request.root, nullptr, nullptr, 0};
  if (has_blocks(request.collective))
    bind_blocks(call, collective);
  else
    bind_arrays(call, collective);
}

void NativeCall::bind_blocks(const Call& call, NativeCollective collective) {
  const exec::Request& request = *call.request;
  const auto blocks = blocks_of(request);
  collective.count = blocks.front().count;
  if (collective.count == 0) return;
  const std::size_t block_bytes = collective.count * size_of(collective.dtype);
  const bool is_one = are_one_array(blocks, block_bytes);
  std::byte* const all =
      is_one ? blocks.front().data : scratch_.take(block_bytes * blocks.size(), call.captured);
  const auto own_of = [&](std::span<const exec::Array> arrays) {
    return arrays[arrays.size() == 1 ? 0 : static_cast<std::size_t>(of_.setting_.rank)].data;
  };
  const bool scatters = request.collective == Collective::kReduceScatter;
  collective.input = scatters ? all : own_of(request.inputs);
  collective.output = scatters ? own_of(request.outputs) : all;
  collectives_.push_back(collective);
}

void NativeCall::bind_arrays(const Call& call, NativeCollective collective) {
  const exec::Request& request = *call.request;
  const bool at_root = of_.setting_.rank == request.root;
  const bool has_input = request.collective != Collective::kBroadcast || at_root;
  const bool has_output = request.collective != Collective::kReduce || at_root;
  const auto& arrays = has_input ? request.inputs : request.outputs;
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    collective.count = arrays[i].count;
    collective.output = has_output ? request.outputs[i].data : nullptr;
    collective.input = has_input ? request.inputs[i].data : collective.output;
    if (collective.count > 0) collectives_.push_back(collective);
  }
}

// Adds the residuals to copies of the inputs, in the outputs, and clears them: nothing is lost.
void NativeCall::deliver_residuals(Call& call) {
  of_.begin(call);
  of_.bind_feedback(call);
  const exec::Request& request = *call.request;
  for (std::size_t i = 0; i < request.outputs.size(); ++i) {
    auto* const y = reinterpret_cast<float*>(request.outputs[i].data);
    const std::uint64_t count = request.outputs[i].count;
    if (request.inputs[i].data != request.outputs[i].data)
      check(of_.api_,
            of_.api_.copy(y, request.inputs[i].data, count * sizeof(float), CopyKind::kOnDevice,
                          call.stream),
            "cudaMemcpyAsync");
    const Run run{.x = y, .y = y, .n = count, .run_feedback = call.extent_feedback[i].run_feedback};
    check(of_.api_, of_.api_.deliver_runs(&run, 1, call.stream), "delivering");
  }
  for (NativeCollective& each : collectives_) each.input = each.output;
}

void NativeCall::check_results(const Call& call) {
  for (const exec::Array& each : call.request->outputs)
    check(of_.api_,
          of_.api_.check_finite(reinterpret_cast<float*>(each.data), each.count, call.flags,
                                call.stream),
          "looking for NaN");
  of_.settle(call, /*shared=*/true);
}

// Copies blocks to the scratch or back, if they are not one array.
void NativeCall::copy_blocks(const Call& call, std::span<const exec::Array> blocks, bool in) {
  if (collectives_.empty()) return;
  const std::size_t bytes = blocks.front().count * size_of(call.request->dtype);
  if (are_one_array(blocks, bytes)) return;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    std::byte* const staged = scratch_.data() + i * bytes;
    check(of_.api_,
          of_.api_.copy(in ? staged : blocks[i].data, in ? blocks[i].data : staged, bytes,
                        CopyKind::kOnDevice, call.stream),
          "cudaMemcpyAsync");
  }
}

}  // namespace gradwire::cuda
