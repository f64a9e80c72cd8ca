#include "gradwire/cuda/gpu_native.h"

namespace gradwire::cuda {
namespace {

bool has_blocks(Collective collective) {
  return collective == Collective::kReduceScatter || collective == Collective::kAllGather;
}

// The p blocks of reduce_scatter's inputs and all_gather's outputs.
std::span<const exec::Array> blocks_of(const exec::Request& request) {
  return request.collective == Collective::kReduceScatter ? request.inputs : request.outputs;
}

bool are_one_array(std::span<const exec::Array> blocks, std::size_t block_bytes) {
  for (std::size_t i = 1; i < blocks.size(); ++i)
    if (blocks[i].data != blocks[i - 1].data + block_bytes) return false;
  return true;
}

// Of those that a rank sends in a ring.
std::uint64_t ring_bytes(const NativeCollective& collective, int size) {
  const auto p = static_cast<std::uint64_t>(size);
  const std::uint64_t bytes = collective.count * size_of(collective.dtype);
  if (collective.collective == Collective::kAllReduce) return 2 * bytes * (p - 1) / p;
  return has_blocks(collective.collective) ? bytes * (p - 1) : bytes;
}

}  // namespace

void NativeCall::run(const exec::Request& request, bool in_place, const CallStream& stream) {
  collectives_.clear();
  const NativeCollective collective{
      request.collective, request.dtype, request.op, request.root, nullptr, nullptr, 0};
  const bool scatters = request.collective == Collective::kReduceScatter;
  const bool gathers = request.collective == Collective::kAllGather;
  if (scatters || gathers)
    bind_blocks(request, collective, stream);
  else
    bind_arrays(request, collective, in_place);
  if (collectives_.empty()) return;
  const std::size_t bytes = collectives_.front().count * size_of(request.dtype);
  if (scatters) copy_blocks(request.inputs, bytes, /*in=*/true, stream);
  messages_.run_native(collectives_, stream);
  for (const NativeCollective& each : collectives_) sent_ += ring_bytes(each, request.size);
  if (gathers) copy_blocks(request.outputs, bytes, /*in=*/false, stream);
}

void NativeCall::bind_blocks(const exec::Request& request, NativeCollective collective,
                             const CallStream& stream) {
  const auto blocks = blocks_of(request);
  collective.count = blocks.front().count;
  if (collective.count == 0) return;
  const std::size_t block_bytes = collective.count * size_of(collective.dtype);
  const bool is_one = are_one_array(blocks, block_bytes);
  std::byte* const all =
      is_one ? blocks.front().data : scratch_.take(block_bytes * blocks.size(), stream);
  const auto own_of = [&](std::span<const exec::Array> arrays) {
    return arrays[arrays.size() == 1 ? 0 : static_cast<std::size_t>(request.rank)].data;
  };
  const bool scatters = request.collective == Collective::kReduceScatter;
  collective.input = scatters ? all : own_of(request.inputs);
  collective.output = scatters ? own_of(request.outputs) : all;
  collectives_.push_back(collective);
}

void NativeCall::bind_arrays(const exec::Request& request, NativeCollective collective,
                             bool in_place) {
  const bool at_root = request.rank == request.root;
  const bool has_input = request.collective != Collective::kBroadcast || at_root;
  const bool has_output = request.collective != Collective::kReduce || at_root;
  const auto& arrays = has_input ? request.inputs : request.outputs;
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    collective.count = arrays[i].count;
    collective.output = has_output ? request.outputs[i].data : nullptr;
    collective.input = has_input && !in_place ? request.inputs[i].data : collective.output;
    if (collective.count > 0) collectives_.push_back(collective);
  }
}

// Copies blocks to the scratch or back, if they are not one array.
void NativeCall::copy_blocks(std::span<const exec::Array> blocks, std::size_t bytes, bool in,
                             Stream stream) {
  if (are_one_array(blocks, bytes)) return;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    std::byte* const staged = scratch_.data() + i * bytes;
    check(api_,
          api_.copy(in ? staged : blocks[i].data, in ? blocks[i].data : staged, bytes,
                    CopyKind::kOnDevice, stream),
          "cudaMemcpyAsync");
  }
}

}  // namespace gradwire::cuda
