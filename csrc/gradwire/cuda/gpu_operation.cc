#include "gradwire/cuda/gpu_operation.h"

namespace gradwire::cuda {

void GpuOperation::bind(const exec::Request& request, const CallStream& stream) {
  stream_ = stream;
  plan_ = plans_.find(request, {});
  buffer_map_.make(request, *plan_,
                   [this](std::size_t bytes) { return scratch_.take(bytes, stream_); });
  copy(buffer_map_.before());
}

void GpuOperation::run(const Coding& coding, std::span<const Slotted> layout) {
  GpuExecution::GpuCall call;
  call.plan = plan_.get();
  call.arrays = buffer_map_.arrays();
  call.codec = coding.codec;
  call.array_feedback = coding.array_feedback;
  call.scratch = coding.scratch;
  call.flags = coding.flags;
  call.layout = layout;
  if (direct_.can_run(call, messages_))
    direct_.run(call, messages_, stream_);
  else
    execution_.run(call, messages_, stream_);
  if (plan_->folds()) fold();
  copy(buffer_map_.after());
}

void GpuOperation::copy(const std::vector<exec::CopyStep>& steps) {
  for (const exec::CopyStep& each : steps)
    check(api_, api_.copy(each.to, each.from, each.bytes, CopyKind::kOnDevice, stream_),
          "cudaMemcpyAsync");
}

// Adds the ranks' blocks, which lie end to end, in the order of the ranks, the same on all of them.
void GpuOperation::fold() {
  const OpSpec& spec = plan_->spec();
  const std::size_t element = size_of(spec.dtype), block = plan_->counts()[0] * element;
  const std::byte* first = buffer_map_.arrays()[0];
  for (const exec::Array& sum : buffer_map_.sums()) {
    const FoldSpan span{first, sum.data, sum.count, 0};
    const GpuPayloads others{first + block, static_cast<std::int64_t>(block),
                             static_cast<int>(plan_->counts().size()) - 1};
    check(api_,
          api_.fold_spans(static_cast<int>(spec.dtype), static_cast<int>(spec.op), &span, 1, others,
                          plan_->divisor(), stream_),
          "folding");
    first += sum.count * element;
  }
}

}  // namespace gradwire::cuda
