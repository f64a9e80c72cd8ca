// What tests of codecs' kernels share: feedback on the device, and values of all kinds.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "cuda_arrays.h"
#include "cuda_families.h"

namespace gradwire::cuda {

inline const Api& api() { return simulated_api(); }
inline Stream stream() { return test_stream(); }

// That the call was enqueued.
#define RUN(call) ASSERT_EQ((call), 0)

// A key's feedback on the device: e, and e' of any content.
class DeviceFeedback {
 public:
  explicit DeviceFeedback(const std::vector<float>& e, std::size_t shift = 0,
                          std::uint32_t which = 0, std::uint64_t calls = 0)
      : which_(which),
        residuals_{DeviceArray<float>(which == 0 ? e : poison(e.size()), shift),
                   DeviceArray<float>(which == 0 ? poison(e.size()) : e, shift)},
        key_state_(
            {KeyState{.which = which, .which_memory = 0, .calls = calls, .codec_state = {}}}) {}

  RunFeedback run_feedback() const {
    return {{residuals_[0].data(), residuals_[1].data()}, key_state_.data()};
  }
  std::vector<float> before() const { return residuals_[which_].values(); }
  std::vector<float> after() const { return residuals_[which_ ^ 1U].values(); }
  KeyState key_state() const { return key_state_.value(); }

 private:
  static std::vector<float> poison(std::size_t n) { return std::vector<float>(n, 7.0F); }

  std::uint32_t which_;
  DeviceArray<float> residuals_[2];
  DeviceArray<KeyState> key_state_;
};

inline std::vector<std::byte> draw_bytes(std::size_t n, std::mt19937_64& random) {
  std::vector<std::byte> bytes(n);
  for (std::byte& each : bytes) each = static_cast<std::byte>(random());
  return bytes;
}

// Whether they are so bit for bit; says where they are not.
template <typename T>
testing::AssertionResult same(const std::vector<T>& actual, const std::vector<T>& expected) {
  if (actual.size() != expected.size())
    return testing::AssertionFailure() << actual.size() << " instead of " << expected.size();
  for (std::size_t i = 0; i < actual.size(); ++i)
    if (std::memcmp(&actual[i], &expected[i], sizeof(T)) != 0)
      return testing::AssertionFailure()
             << testing::PrintToString(actual[i]) << " instead of "
             << testing::PrintToString(expected[i]) << " at " << i << " of " << actual.size();
  return testing::AssertionSuccess();
}

}  // namespace gradwire::cuda
