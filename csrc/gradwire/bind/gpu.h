// A rank's GPU as Python holds it (cuda/).
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "gradwire/bind/communicator_handle.h"
#include "gradwire/bind/cuda_parts.h"
#include "gradwire/cuda/gpu_fault_monitor.h"
#include "gradwire/cuda/messages/messages_loopback.h"

namespace gradwire::bind {

// Messages, and the objects that must outlive them.
struct CudaMessages {
  std::unique_ptr<cuda::Messages> messages;
  std::vector<std::shared_ptr<void>> kept;
};

class Gpu {
 public:
  // `shadow` serves this GPU alone. Both communicators are kept alive.
  Gpu(std::shared_ptr<CommunicatorHandle> users, std::shared_ptr<CommunicatorHandle> shadow,
      int device, CudaMessages& messages);
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  // Any thread may call all of these, even while close() is under way. In a fork calls throw
  // Aborted, and abort() and close() do nothing.
  void run(const OwnedRequest& request, CudaFeedback* feedback, std::uintptr_t stream,
           double timeout);
  // Before the first call.
  void set_model(const schedule::CostModel& model);
  void abort(const std::string& reason) noexcept;
  // Returns what watches the calls, and keeps it alive. Throws Aborted once this is closed.
  std::shared_ptr<cuda::GpuFaultMonitor> monitor() const;
  std::uint64_t sent() const;
  std::string messages() const { return messages_; }
  // Releases everything. What is enqueued must be over, or have failed. Later calls throw Aborted.
  void close();

 private:
  struct Parts;
  std::shared_ptr<Parts> parts() const;  // never null

  const int device_;
  std::shared_ptr<CommunicatorHandle> users_, shadow_;
  CudaMessages kept_;
  std::string messages_;
  mutable std::mutex mutex_;  // guards what follows
  std::uint64_t sent_ = 0;
  std::shared_ptr<Parts> parts_;  // null: closed; a call that is under way keeps it alive
};

}  // namespace gradwire::bind
