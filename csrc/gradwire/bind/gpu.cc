#include "gradwire/bind/gpu.h"

#include "gradwire/base/error.h"
#include "gradwire/bind/module.h"

namespace gradwire::bind {

// Ends when its last user releases it.
struct Gpu::Parts {
  Parts(cuda::GpuIdentity setting, std::unique_ptr<cuda::Messages> messages,
        CommunicatorHandle& shadow, CommunicatorHandle& users)
      : gpu(std::make_unique<cuda::GpuCommunicator>(cuda_api(), std::move(setting),
                                                    std::move(messages))),
        monitor(std::make_unique<cuda::GpuFaultMonitor>(*gpu, shadow.get(), users.get())) {}
  ~Parts() {
    try {
      const cuda::OnDevice here(gpu->api(), gpu->device());
      monitor.reset();
      gpu.reset();
    } catch (const Error&) {  // the program ends, and CUDA has ended before it
    }
  }
  Parts(const Parts&) = delete;
  Parts& operator=(const Parts&) = delete;

  std::unique_ptr<cuda::GpuCommunicator> gpu;
  std::unique_ptr<cuda::GpuFaultMonitor> monitor;
};

Gpu::Gpu(std::shared_ptr<CommunicatorHandle> users, std::shared_ptr<CommunicatorHandle> shadow,
         int device, CudaMessages& messages)
    : device_(device), users_(std::move(users)), shadow_(std::move(shadow)) {
  const cuda::OnDevice here(cuda_api(), device_);
  kept_.kept = messages.kept;
  const exec::Identity& identity = users_->get().identity();
  parts_ = std::make_shared<Parts>(cuda::GpuIdentity{identity.rank, identity.size, identity.hosts,
                                                     device_, users_->get().has_sites()},
                                   std::move(messages.messages), *shadow_, *users_);
  messages_ = parts_->gpu->messages();
}

Gpu::~Gpu() {
  end_on(device_, [this] { close(); });
  if (!is_cuda_elsewhere()) return;
  [[maybe_unused]] const auto* parts = new std::shared_ptr<Parts>(std::move(parts_));
  [[maybe_unused]] const auto* kept = new CudaMessages(std::move(kept_));
}

std::shared_ptr<Gpu::Parts> Gpu::parts() const {
  cuda_api();  // throws in a fork, where the mutex may never become free
  const std::lock_guard lock(mutex_);
  if (!parts_) throw Aborted("this communicator is closed");
  return parts_;
}

void Gpu::set_model(const schedule::CostModel& model) { parts()->gpu->set_model(model); }

void Gpu::run(const OwnedRequest& request, CudaFeedback* feedback, std::uintptr_t stream,
              double timeout) {
  const auto held = parts();
  const auto call = [&](cuda::GpuFeedback* its) {
    held->monitor->run(request.view(timeout), its, stream_of(stream));
  };
  feedback == nullptr ? call(nullptr) : feedback->with([&](cuda::GpuFeedback& its) { call(&its); });
}

std::shared_ptr<cuda::GpuFaultMonitor> Gpu::monitor() const {
  const auto held = parts();
  return {held, held->monitor.get()};
}

void Gpu::abort(const std::string& reason) noexcept {
  if (is_cuda_elsewhere()) return;
  std::unique_lock lock(mutex_);
  const auto held = parts_;
  lock.unlock();
  if (held) held->monitor->abort(reason);
}

std::uint64_t Gpu::sent() const {
  cuda_api();
  const std::lock_guard lock(mutex_);
  return parts_ ? parts_->gpu->sent() : sent_;
}

void Gpu::close() {
  if (is_cuda_elsewhere()) return;
  std::unique_lock lock(mutex_);
  if (!parts_) return;
  sent_ = parts_->gpu->sent();
  const auto last = std::move(parts_);
  lock.unlock();
}

}  // namespace gradwire::bind
