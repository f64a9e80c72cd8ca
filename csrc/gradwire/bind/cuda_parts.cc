#include "gradwire/bind/cuda_parts.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <string>
#include <vector>

#include "gradwire/base/error.h"
#include "gradwire/base/fork.h"
#include "gradwire/bind/module.h"
#include "gradwire/cuda/device.h"

namespace gradwire::bind {
namespace {

// The process that uses CUDA: this one, or one that this one was forked from.
struct User {
  std::atomic<pid_t> process{0};
  std::atomic<std::uint32_t> after{0};         // forks() when CUDA was first used
  std::atomic<const cuda::Api*> api{nullptr};  // null: no process uses CUDA
};
User user;

// The process's streams, by device. Neither the streams nor the pool are ever destroyed.
class StreamPool {
 public:
  static StreamPool& get() {
    static auto* const one = new StreamPool;
    return *one;
  }

  // Returns a stream whose work is over, so that nobody waits for another communicator's work.
  cuda::Stream take(const cuda::Api& api, int device) {
    const std::lock_guard lock(mutex_);
    auto& idle = idle_[device];
    const auto found =
        std::ranges::find_if(idle, [&api](const Idle& each) { return is_over(api, each); });
    if (found == idle.end()) {
      cuda::Stream fresh = nullptr;
      cuda::check(api, api.create_stream(&fresh), "cudaStreamCreate");
      return fresh;
    }
    const cuda::Stream stream = found->stream;
    idle.erase(found);
    return stream;
  }

  void give_back(const cuda::Api& api, int device, cuda::Stream stream) {
    Idle idle{stream, std::make_unique<cuda::OwnedEvent>(api)};
    cuda::check(api, api.record(idle.end->get(), stream), "cudaEventRecord");
    const std::lock_guard lock(mutex_);
    idle_[device].push_back(std::move(idle));
  }

 private:
  struct Idle {
    cuda::Stream stream;
    std::unique_ptr<cuda::OwnedEvent> end;  // of the stream's work
  };
  static bool is_over(const cuda::Api& api, const Idle& idle) {
    int done = 0;
    return api.query(idle.end->get(), &done) == 0 && done != 0;
  }

  std::mutex mutex_;
  std::map<int, std::vector<Idle>> idle_;
};

}  // namespace

bool is_cuda_elsewhere() noexcept { return user.api != nullptr && user.after != forks(); }

const cuda::Api& cuda_api() {
  if (is_cuda_elsewhere())
    throw Aborted("process " + std::to_string(user.process) + " uses CUDA, of which this one (" +
                  std::to_string(::getpid()) +
                  ") is a fork, and there CUDA does not work: start processes by "
                  "multiprocessing's \"spawn\", or fork before the first array on a GPU");
  if (const cuda::Api* known = user.api; known != nullptr) return *known;
  const cuda::Api& api = cuda::load_api();
  user.process = ::getpid();
  user.after = forks();
  user.api = &api;
  return api;
}

bool is_captured(int device, std::uintptr_t stream) {
  const OnGpu gpu(device);
  return cuda::capture_of(gpu.api, stream_of(stream)) != 0;
}

void end_on(int device, const std::function<void()>& end) noexcept {
  if (is_cuda_elsewhere()) return;
  const Unlocked unlocked;
  try {
    const OnGpu here(device);
    end();
  } catch (const Error&) {  // the program ends, and CUDA has ended before it
  }
}

CudaEvent::CudaEvent(int device) : device_(device) {
  const OnGpu gpu(device_);
  event_ = std::make_unique<cuda::OwnedEvent>(gpu.api);
}

CudaEvent::~CudaEvent() { end_on(device_, event_); }

void CudaEvent::record(std::uintptr_t stream) {
  const OnGpu gpu(device_);
  cuda::check(gpu.api, gpu.api.record(event_->get(), stream_of(stream)), "cudaEventRecord");
}

void CudaEvent::wait(std::uintptr_t stream) const {
  const OnGpu gpu(device_);
  cuda::check(gpu.api, gpu.api.wait(stream_of(stream), event_->get()), "cudaStreamWaitEvent");
}

bool CudaEvent::done() const {
  const OnGpu gpu(device_);
  int found = 0;
  cuda::check(gpu.api, gpu.api.query(event_->get(), &found), "cudaEventQuery");
  return found != 0;
}

CudaStream::CudaStream(int device) : device_(device) {
  const OnGpu gpu(device_);
  stream_ = StreamPool::get().take(gpu.api, device_);
}

CudaStream::~CudaStream() {
  end_on(device_, [this] { StreamPool::get().give_back(cuda_api(), device_, stream_); });
}

CudaMemory::CudaMemory(int device, std::uint64_t bytes) : device_(device) {
  const OnGpu gpu(device_);
  memory_ = std::make_unique<cuda::Room>(gpu.api);
  cuda::check(gpu.api,
              gpu.api.fill(memory_->take(std::max<std::uint64_t>(1, bytes)), 0, bytes, nullptr),
              "cudaMemsetAsync");
  cuda::await_device(gpu.api, device_);
}

CudaMemory::~CudaMemory() {
  end_on(device_, [this] {
    cuda::await_device(cuda_api(), device_);
    memory_.reset();
  });
  if (is_cuda_elsewhere()) [[maybe_unused]]
    const auto* kept = memory_.release();
}

CudaFeedback::CudaFeedback(std::shared_ptr<codec::ErrorFeedback> host, int device)
    : device_(device) {
  const OnGpu gpu(device_);
  own_ = std::make_unique<cuda::GpuFeedback>(gpu.api, std::move(host));
}

CudaFeedback::~CudaFeedback() { end_on(device_, own_); }

}  // namespace gradwire::bind
