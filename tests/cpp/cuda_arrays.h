// Arrays in device memory, for tests of kernels.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "gradwire/cuda/device.h"

namespace gradwire::cuda {

inline const Api& simulated_api() {
  static const Api& api = load_api(GRADWIRE_SIMULATED_CUDA_SO);
  return api;
}

inline Stream test_stream() {
  static const OwnedStream stream(simulated_api());
  return stream.get();
}

inline void wait_for_device() {
  check(simulated_api(), simulated_api().synchronize(test_stream()), "synchronize");
}

// n elements at any alignment of an element (`shift`), between guards that nothing may write.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& values, std::size_t shift = 1)
      : count_(values.size()), shift_(shift), room_(simulated_api()) {
    std::vector<std::byte> all((count_ + 2 * kGuard) * sizeof(T), kGuardByte);
    if (count_ > 0) std::memcpy(all.data() + offset(), values.data(), count_ * sizeof(T));
    room_.take(all.size());
    copy(room_.data(), all.data(), all.size(), CopyKind::kToDevice);
  }

  T* data() const { return reinterpret_cast<T*>(room_.data() + offset()); }
  std::size_t size() const { return count_; }

  // What it holds when all that was enqueued is done.
  std::vector<T> values() const {
    std::vector<std::byte> all((count_ + 2 * kGuard) * sizeof(T));
    copy(all.data(), room_.data(), all.size(), CopyKind::kToHost);
    const std::span inner = std::span(all).subspan(offset(), count_ * sizeof(T));
    EXPECT_EQ(std::ranges::count(all, kGuardByte) - std::ranges::count(inner, kGuardByte),
              static_cast<std::ptrdiff_t>(2 * kGuard * sizeof(T)))
        << "written beyond an array";
    std::vector<T> found(count_);
    if (count_ > 0) std::memcpy(found.data(), inner.data(), inner.size());
    return found;
  }

  void set(const std::vector<T>& values) {
    copy(data(), values.data(), count_ * sizeof(T), CopyKind::kToDevice);
  }

 private:
  static constexpr std::size_t kGuard = 64;  // elements
  static constexpr std::byte kGuardByte{0xA5};

  std::size_t offset() const { return (kGuard / 2 + shift_) * sizeof(T); }
  static void copy(void* to, const void* from, std::size_t bytes, CopyKind kind) {
    const Api& api = simulated_api();
    check(api, api.copy(to, from, bytes, kind, test_stream()), "copy");
    wait_for_device();
  }

  std::size_t count_, shift_;
  Room room_;
};

}  // namespace gradwire::cuda
