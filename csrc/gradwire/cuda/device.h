// Access to the GPUs of this process through gradwire_cuda (cuda/api.h), which is loaded at first
// use.
#pragma once

#include <cstddef>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gradwire/base/error.h"
#include "gradwire/cuda/api.h"

namespace gradwire::cuda {

// Returns the table of `library`; by default that is GRADWIRE_CUDA_SO, or libgradwire_cuda.so
// beside the core. Throws InvalidArgument with the reason and the remedy where it is absent or of
// another version. Loads each library once.
const Api& load_api(const std::string& library = "");

// Returns the path that load_api() uses by default.
std::string api_path();

// A failed CUDA call. Work enqueued on the device before it may be lost.
class CudaError : public Error {
 public:
  using Error::Error;
};

// Throws CudaError, "what: CUDA's message (number)", unless the status is 0.
void check(const Api& api, Status status, const char* what);

// Returns 0 where the stream is not being captured in a graph, else a number of the capture.
std::uint64_t capture_of(const Api& api, Stream stream);

// A stream on which a call is enqueued, and the capture (capture_of()) that it is part of.
struct CallStream {
  Stream stream = nullptr;
  std::uint64_t capture = 0;

  bool is_captured() const noexcept { return capture != 0; }
  operator Stream() const noexcept { return stream; }
};

// Makes `device` this thread's, and restores the thread's device in the end, unless this process
// has not yet begun to use that one: restoring it would then initialise it, which takes hundreds of
// megabytes there.
class OnDevice {
 public:
  OnDevice(const Api& api, int device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  const Api& api_;
  const int device_;
  int before_ = 0;
};

// Waits until all work enqueued on this thread's device is over, at most a few seconds. Work that
// is not over then may still use its memory: none of the device's Rooms is released any more until
// such a wait has succeeded. No stream of the device may be captured meanwhile.
void await_device(const Api& api) noexcept;
void await_device(const Api& api, int device) noexcept;  // of `device`

// Waits for the same on a thread of its own, however long that takes.
std::future<Status> synchronize_apart(const Api& api, int device);

// Device or pinned memory that only grows, and never while its stream is captured in a graph.
// Outgrown memory stays until the end, since streams may still use it. Releasing it waits for
// nothing, so its owner calls await_device() first.
class Room {
 public:
  enum class MemoryKind : bool { kDevice, kPinned };
  explicit Room(const Api& api, MemoryKind kind = MemoryKind::kDevice) : api_(&api), kind_(kind) {}
  Room(Room&& other) noexcept
      : api_(other.api_),
        kind_(other.kind_),
        data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)),
        device_(other.device_),
        outgrown_(std::move(other.outgrown_)) {}
  Room& operator=(Room&&) = delete;
  ~Room();

  // Returns at least `bytes` bytes. Their contents are kept unless it grows; then they are
  // unspecified. Throws InvalidArgument if it must grow while the stream is captured.
  std::byte* take(std::size_t bytes, const CallStream& stream = {});
  std::byte* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return bytes_; }

 private:
  const Api* api_;
  MemoryKind kind_;
  void release(void* data) noexcept;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  int device_ = 0;
  std::vector<void*> outgrown_;
};

// A stream or an event with one owner.
template <typename Handle, auto kCreate, auto kDestroy>
class Owned {
 public:
  explicit Owned(const Api& api) : api_(api) {
    check(api, (api.*kCreate)(&handle_), "creating a stream or an event");
  }
  ~Owned() { (api_.*kDestroy)(handle_); }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  Handle get() const noexcept { return handle_; }

 private:
  const Api& api_;
  Handle handle_ = nullptr;
};
using OwnedStream = Owned<Stream, &Api::create_stream, &Api::destroy_stream>;
using OwnedEvent = Owned<Event, &Api::create_event, &Api::destroy_event>;

}  // namespace gradwire::cuda
