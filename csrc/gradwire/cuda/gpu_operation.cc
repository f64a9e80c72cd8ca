#include "gradwire/cuda/gpu_operation.h"

namespace gradwire::cuda {

void Operation::bind(const exec::Request& request, bool captured) {
  captured_ = captured;
  plan_ = place_.plans->find(request, {});
  buffer_map_.make(request, *plan_, place_.rank, place_.size,
                   [this](std::size_t bytes) { return scratch_.take(bytes, captured_); });
}

void Operation::begin(Stream stream) { copy(buffer_map_.before(), stream); }

void Operation::run(const Coding& coding, std::span<const Slotted> layout, Stream stream) {
  Execution::Call call;
  call.plan = plan_.get();
  call.extents = buffer_map_.extents();
  call.codec = coding.codec;
  call.extent_feedback = coding.extent_feedback;
  call.scratch = coding.scratch;
  call.flags = coding.flags;
  call.layout = layout;
  call.captured = captured_;
  if (direct_.can_run(call, *place_.messages))
    direct_.run(call, *place_.messages, stream);
  else
    execution_.run(call, *place_.messages, stream);
  if (plan_->folds()) fold(stream);
  copy(buffer_map_.after(), stream);
}

void Operation::copy(const std::vector<exec::CopyStep>& steps, Stream stream) {
  for (const exec::CopyStep& each : steps)
    check(api_, api_.copy(each.to, each.from, each.bytes, CopyKind::kOnDevice, stream),
          "cudaMemcpyAsync");
}

// Adds the ranks' blocks, which lie end to end, in the order of the ranks, the same on all of them.
void Operation::fold(Stream stream) {
  const OpSpec& spec = plan_->spec();
  const std::size_t element = size_of(spec.dtype), block = plan_->counts()[0] * element;
  const std::byte* first = buffer_map_.extents()[0];
  for (const exec::Array& sum : buffer_map_.sums()) {
    const FoldRun run{first, sum.data, sum.count, 0};
    const Payloads others{first + block, static_cast<std::int64_t>(block), place_.size - 1};
    check(api_,
          api_.fold_runs(static_cast<int>(spec.dtype), static_cast<int>(spec.op), &run, 1, others,
                         plan_->divisor(), stream),
          "folding");
    first += sum.count * element;
  }
}

}  // namespace gradwire::cuda
