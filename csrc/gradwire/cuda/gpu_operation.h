// Operation: runs one schedule over one request's arrays in device memory, with the copies before
// and after it. It is reused from call to call; enqueued work uses its memory in stream order.
#pragma once

#include <memory>
#include <span>

#include "gradwire/cuda/gpu_direct.h"
#include "gradwire/cuda/gpu_execution.h"
#include "gradwire/exec/plan/buffer_map.h"
#include "gradwire/exec/plan/plan_cache.h"

namespace gradwire::cuda {

class Operation {
 public:
  struct Place {
    Rank rank = 0;
    int size = 1;
    Messages* messages = nullptr;
    exec::PlanCache* plans = nullptr;
  };
  // The codec of a lossy operation, and its arguments.
  struct Coding {
    const Codec* codec = nullptr;
    std::span<const ExtentFeedback> extent_feedback;
    std::byte* scratch = nullptr;
    std::uint32_t* flags = nullptr;
  };

  Operation(const Api& api, const Place& place)
      : api_(api),
        place_(place),
        scratch_(api),
        execution_(api),
        direct_(api, place.rank, place.size) {}

  // Finds the plan and the places of the arrays. Throws as a call on the CPU does.
  void bind(const exec::Request& request, bool captured);
  const exec::Plan& plan() const noexcept { return *plan_; }
  const exec::BufferMap& buffer_map() const noexcept { return buffer_map_; }

  std::uint64_t sent() const noexcept { return execution_.sent() + direct_.sent(); }

  // begin() enqueues the copies that come first; run() all the rest. `layout` describes plain
  // blocks that are payloads.
  void begin(Stream stream);
  void run(const Coding& coding, std::span<const Slotted> layout, Stream stream);

 private:
  void copy(const std::vector<exec::CopyStep>& steps, Stream stream);
  void fold(Stream stream);

  const Api& api_;
  const Place place_;
  bool captured_ = false;
  std::shared_ptr<const exec::Plan> plan_;
  exec::BufferMap buffer_map_;
  Room scratch_;
  Execution execution_;
  DirectExchange direct_;
};

}  // namespace gradwire::cuda
