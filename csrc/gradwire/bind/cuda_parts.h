// Events, streams and residuals of one GPU, as Python holds them. In a process that was forked from
// the one that uses CUDA, every call throws and the destructors touch nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "gradwire/codec/feedback/feedback.h"
#include "gradwire/cuda/gpu_feedback.h"

namespace gradwire::bind {

// Returns the function table of the CUDA part. Throws Aborted in a fork of a process that had it.
const cuda::Api& cuda_api();
// Returns whether this is such a fork, where destructors must leave CUDA alone.
bool is_cuda_elsewhere() noexcept;

// Makes a device this thread's for as long as it lives. Throws as cuda_api() does.
struct OnGpu {
  explicit OnGpu(int device) : on_device(api, device) {}

  const cuda::Api& api = cuda_api();
  cuda::OnDevice on_device;
};

inline cuda::Stream stream_of(std::uintptr_t handle) {
  return reinterpret_cast<cuda::Stream>(handle);
}

// Returns whether work that is enqueued there becomes part of a graph.
bool is_captured(int device, std::uintptr_t stream);

// Runs `end` on the device, for destructors. They hold the interpreter's lock, which this releases,
// since `end` may take as long as the device works. In a fork it does nothing.
void end_on(int device, const std::function<void()>& end) noexcept;

// Destroys `owned` on the device in the same way. In a fork it leaks.
template <typename Owned>
void end_on(int device, std::unique_ptr<Owned>& owned) noexcept {
  end_on(device, [&owned] { owned.reset(); });
  [[maybe_unused]] Owned* leaked = owned.release();
}

class CudaEvent {
 public:
  explicit CudaEvent(int device);
  ~CudaEvent();
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  void record(std::uintptr_t stream);
  void wait(std::uintptr_t stream) const;
  bool done() const;

 private:
  int device_;
  std::unique_ptr<cuda::OwnedEvent> event_;
};

// A stream that no one else in this process has. It is never destroyed, but given to the next user:
// torch's allocator keeps what record_stream() named, and records an event there when the tensor is
// freed, however late.
class CudaStream {
 public:
  explicit CudaStream(int device);
  ~CudaStream();
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  std::uintptr_t handle() const { return reinterpret_cast<std::uintptr_t>(stream_); }

 private:
  int device_;
  cuda::Stream stream_ = nullptr;
};

// Zeros in a device's memory. The device comes to rest before they are released.
class CudaMemory {
 public:
  CudaMemory(int device, std::uint64_t bytes);
  ~CudaMemory();
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;

  std::uintptr_t address() const noexcept {
    return reinterpret_cast<std::uintptr_t>(memory_->data());
  }

 private:
  int device_;
  std::unique_ptr<cuda::Room> memory_;
};

// May be used from any thread: its calls run one after the other.
class CudaFeedback {
 public:
  CudaFeedback(std::shared_ptr<codec::ErrorFeedback> host, int device);
  ~CudaFeedback();
  CudaFeedback(const CudaFeedback&) = delete;
  CudaFeedback& operator=(const CudaFeedback&) = delete;

  int device() const noexcept { return device_; }

  // Returns body(feedback), which it calls on the device while nobody else uses the feedback.
  template <typename Body>
  auto with(Body body) {
    const OnGpu here(device_);
    const std::lock_guard lock(mutex_);
    return body(*own_);
  }

 private:
  int device_;
  std::mutex mutex_;
  std::unique_ptr<cuda::GpuFeedback> own_;
};

}  // namespace gradwire::bind
