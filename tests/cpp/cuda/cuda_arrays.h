// Arrays in device memory, for tests of kernels.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "gradwire/cuda/device.h"

namespace gradwire::cuda {

// The simulated device's; or a real one's, by the plugin that GRADWIRE_TESTED_CUDA_SO names.
inline const Api& simulated_api() {
  static const char* const tested = std::getenv("GRADWIRE_TESTED_CUDA_SO");
  static const Api& api = load_api(tested != nullptr ? tested : GRADWIRE_SIMULATED_CUDA_SO);
  return api;
}

inline Stream test_stream() {
  static const OwnedStream stream(simulated_api());
  return stream.get();
}

inline void wait_for_device() {
  check(simulated_api(), simulated_api().synchronize(test_stream()), "synchronize");
}

// n elements at any alignment of an element (`shift`; 0: aligned), between guards that nothing may
// write. Where a sanitizer looks there is nothing behind them, so that it sees what is read there.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& values, std::size_t shift = 1)
      : count_(values.size()), shift_(shift), room_(simulated_api()) {
    std::vector<std::byte> all(bytes(), kGuardByte);
    if (count_ > 0) std::memcpy(all.data() + offset(), values.data(), count_ * sizeof(T));
    room_.take(all.size());
    copy(room_.data(), all.data(), all.size(), CopyKind::kToDevice);
  }

  T* data() const { return reinterpret_cast<T*>(room_.data() + offset()); }
  std::size_t size() const { return count_; }

  // What it holds when all that was enqueued is done.
  std::vector<T> values() const {
    std::vector<std::byte> all(bytes());
    copy(all.data(), room_.data(), all.size(), CopyKind::kToHost);
    const std::span inner = std::span(all).subspan(offset(), count_ * sizeof(T));
    EXPECT_EQ(std::ranges::count(all, kGuardByte) - std::ranges::count(inner, kGuardByte),
              static_cast<std::ptrdiff_t>(bytes() - count_ * sizeof(T)))
        << "written beyond an array";
    std::vector<T> found(count_);
    if (count_ > 0) std::memcpy(found.data(), inner.data(), inner.size());
    return found;
  }

  T value() const { return values().at(0); }

  void set(const std::vector<T>& values) {
    copy(data(), values.data(), count_ * sizeof(T), CopyKind::kToDevice);
  }

 private:
#if defined(__SANITIZE_ADDRESS__)
  static constexpr std::size_t kBehind = 0;
#else
  static constexpr std::size_t kBehind = 32;
#endif
  static constexpr std::size_t kBefore = 32;  // elements
  static constexpr std::byte kGuardByte{0xA5};

  std::size_t offset() const { return (kBefore + shift_) * sizeof(T); }
  std::size_t bytes() const { return offset() + (count_ + kBehind) * sizeof(T); }
  static void copy(void* to, const void* from, std::size_t bytes, CopyKind kind) {
    const Api& api = simulated_api();
    check(api, api.copy(to, from, bytes, kind, test_stream()), "copy");
    wait_for_device();
  }

  std::size_t count_, shift_;
  Room room_;
};

}  // namespace gradwire::cuda
