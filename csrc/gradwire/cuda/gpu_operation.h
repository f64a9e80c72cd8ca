// GpuOperation: runs one schedule over one request's arrays in device memory, with the copies
// before and after it. It is reused from call to call; enqueued work uses its memory in stream
// order.
#pragma once

#include <memory>
#include <span>

#include "gradwire/cuda/gpu_direct.h"
#include "gradwire/cuda/gpu_execution.h"
#include "gradwire/exec/plan/buffer_map.h"
#include "gradwire/exec/plan/plan_cache.h"

namespace gradwire::cuda {

class GpuOperation {
 public:
  // The codec of a lossy operation, and its arguments.
  struct Coding {
    const GpuCodec* codec = nullptr;
    std::span<const ArrayFeedback> array_feedback;
    std::byte* scratch = nullptr;
    std::uint32_t* flags = nullptr;
  };

  GpuOperation(const Api& api, Rank rank, int size, Messages& messages, exec::PlanCache& plans)
      : api_(api),
        messages_(messages),
        plans_(plans),
        scratch_(api),
        execution_(api),
        direct_(api, rank, size) {}

  // Throws what bind() would throw for the request. Enqueues nothing.
  void find(const exec::Request& request) { plans_.find(request, {}); }
  // Finds the plan and the places of the arrays, and enqueues the copies that come first. Throws as
  // a call on the CPU does.
  void bind(const exec::Request& request, const CallStream& stream);
  // Enqueues the rest. `layout` describes plain blocks that are payloads.
  void run(const Coding& coding, std::span<const Slotted> layout);

  const exec::Plan& plan() const noexcept { return *plan_; }
  const exec::BufferMap& buffer_map() const noexcept { return buffer_map_; }
  std::uint64_t sent() const noexcept { return execution_.sent() + direct_.sent(); }

 private:
  void copy(const std::vector<exec::CopyStep>& steps);
  void fold();

  const Api& api_;
  Messages& messages_;
  exec::PlanCache& plans_;
  CallStream stream_;
  std::shared_ptr<const exec::Plan> plan_;
  exec::BufferMap buffer_map_;
  Room scratch_;
  GpuExecution execution_;
  DirectExchange direct_;
};

}  // namespace gradwire::cuda
