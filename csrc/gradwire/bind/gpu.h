// What Python holds of calls on GPUs (cuda/).
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gradwire/bind/communicator.h"
#include "gradwire/cuda/messages_loopback.h"
#include "gradwire/cuda/watch.h"

namespace gradwire::bind {

// Messages, and what they need to go on.
struct CudaMessages {
  std::unique_ptr<cuda::Messages> messages;
  std::vector<std::shared_ptr<void>> kept;
  std::vector<py::object> kept_objects;
};

class Gpu {
 public:
  // `side` is nobody else's. The communicators are kept.
  Gpu(std::shared_ptr<Communicator> users, std::shared_ptr<Communicator> side, int device,
      CudaMessages& messages);

  void run(const Request& request, cuda::Feedback* feedback, std::uintptr_t stream, double timeout);
  void finish(double timeout) { watch().finish(timeout); }
  void abort(const std::string& reason) noexcept;
  void require_alive() const { watch().require_alive(); }
  std::uint64_t sent() const noexcept { return gpu_ ? gpu_->sent() : sent_; }
  std::string messages() const { return messages_; }
  // Lets go of everything; what is enqueued must be over, or has failed. Later calls throw Aborted.
  void close();

 private:
  cuda::Watch& watch() const;

  std::shared_ptr<Communicator> users_, side_;
  CudaMessages kept_;
  std::string messages_;
  std::uint64_t sent_ = 0;
  std::unique_ptr<cuda::Communicator> gpu_;
  std::unique_ptr<cuda::Watch> watch_;
};

}  // namespace gradwire::bind
