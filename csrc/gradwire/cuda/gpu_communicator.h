// The part of a communicator on one rank's GPU. It makes the same calls as exec/communicator.h, on
// arrays in device memory, enqueued on the caller's stream. A call returns once it is enqueued;
// later work on the stream finds its results. A repeated call waits for nothing and allocates
// nothing, so it can be captured in a CUDA graph.
//
// Calls run in the order in which they are made, on whatever streams. Calls of one capture are
// ordered among themselves; whoever launches the graph orders it with other calls, since they use
// the same memory. One thread at a time may use it; any thread may call abort().
//
// A call whose messages fail still ends: its results are undefined, and residuals are as they were
// before it.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "gradwire/cuda/gpu_device.h"

namespace gradwire::cuda {

// Which rank of a communicator a GPU is.
struct GpuIdentity {
  Rank rank = 0;
  int size = 1;
  std::vector<std::vector<Rank>> hosts;  // ranks of each host (exec::Identity)
  int device = 0;
  bool has_sites = false;  // whether there are several: calls here do not tell them apart
};

class GpuCommunicator {
 public:
  // Works on the identity's device, to which the messages must belong. `api` must outlive it.
  GpuCommunicator(const Api& api, GpuIdentity identity, std::unique_ptr<Messages> messages);
  ~GpuCommunicator();
  GpuCommunicator(const GpuCommunicator&) = delete;
  GpuCommunicator& operator=(const GpuCommunicator&) = delete;

  // Enqueues a call. The arrays of `request` must be in this device's memory. `feedback`, which may
  // be null, takes the place of the request's. Throws InvalidArgument and ScheduleError as a call
  // on the CPU does, before anything is enqueued; and what the messages throw, which every later
  // call throws again.
  void run(exec::Request request, GpuFeedback* feedback, Stream stream);

  // The same in two steps, on a thread that uses this device. bind() sets the request's
  // rank and size, enqueues nothing, and throws all that run() throws for an invalid request. The
  // request must live until enqueue() returns. Outside of captures, enqueue() records `end` at the
  // call's end; null: an event of its own. `end` must live until another call has ended.
  void bind(exec::Request& request, GpuFeedback* feedback, const CallStream& stream);
  void enqueue(Event end = nullptr);

  // Returns the Flag bits of all calls that are over, and clears them.
  std::uint32_t take_flags() { return calls_.take_flags(); }

  // Decides by this model from now on. The ranks must agree.
  void set_model(schedule::CostModel model) { plans_.set_model(std::move(model)); }

  // Returns how many bytes this rank's calls have sent, without replays of graphs.
  std::uint64_t sent() const noexcept { return sent_; }

  int device() const noexcept { return identity_.device; }
  std::string_view messages() const noexcept { return messages_->name(); }
  const Api& api() const noexcept { return api_; }
  // Throws if the messages between the GPUs have failed.
  void check_messages() { messages_->check(); }
  void abort() noexcept { messages_->abort(); }

 private:
  const Api& api_;
  const GpuIdentity identity_;
  std::unique_ptr<Messages> messages_;
  exec::PlanCache plans_;
  GpuDevice calls_;
  OwnedEvent last_, last_captured_;
  Event latest_ = nullptr;          // at the last call's end; null: there was none
  std::uint64_t last_capture_ = 0;  // the capture of last_captured_
  std::atomic<std::uint64_t> sent_{0};
};

}  // namespace gradwire::cuda
