// What tests of codecs' kernels share: feedback on the device, and values of all kinds.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
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
            {GpuKeyState{.which = which, .which_memory = 0, .calls = calls, .codec_state = {}}}) {}

  SpanFeedback span_feedback() const {
    return {{residuals_[0].data(), residuals_[1].data()}, key_state_.data()};
  }
  std::vector<float> before() const { return residuals_[which_].values(); }
  std::vector<float> after() const { return residuals_[which_ ^ 1U].values(); }
  GpuKeyState key_state() const { return key_state_.value(); }

 private:
  static std::vector<float> poison(std::size_t n) { return std::vector<float>(n, 7.0F); }

  std::uint32_t which_;
  DeviceArray<float> residuals_[2];
  DeviceArray<GpuKeyState> key_state_;
};

// Payloads of a codec whose size varies, of so many units each: a table of sizes, and slots.
class SlotArray {
 public:
  SlotArray(std::size_t units, std::size_t slot_bytes, std::size_t count = 1)
      : units_(units),
        slot_bytes_(slot_bytes),
        bytes_(std::vector<std::byte>(count * payload_bytes(), std::byte{0xEE}), 0) {}

  std::size_t payload_bytes() const { return table_bytes() + units_ * slot_bytes_; }
  std::byte* data() const { return bytes_.data(); }
  GpuPayloads payloads(int count = 1) const {
    return {data(), static_cast<std::int64_t>(payload_bytes()), count};
  }

  // Payload `number` becomes these units, padded with zeros.
  void set(const std::vector<std::vector<std::byte>>& units, std::size_t number = 0) {
    std::vector<std::byte> all = bytes_.values();
    std::byte* const at = all.data() + number * payload_bytes();
    for (std::size_t u = 0; u < units.size(); ++u) {
      const auto size = static_cast<std::uint32_t>(units[u].size());
      std::memcpy(at + u * sizeof size, &size, sizeof size);
      const std::vector<std::byte> slot = padded(units[u]);
      std::memcpy(at + table_bytes() + u * slot_bytes_, slot.data(), slot_bytes_);
    }
    bytes_.set(all);
  }
  // A unit as decoders find it: all of its slot.
  std::vector<std::byte> padded(std::vector<std::byte> unit) const {
    unit.resize(slot_bytes_);
    return unit;
  }

  // The bytes that count of each unit of the first payload.
  std::vector<std::vector<std::byte>> units() const {
    const std::vector<std::byte> all = bytes_.values();
    std::vector<std::vector<std::byte>> found;
    for (std::size_t u = 0; u < units_; ++u) {
      std::uint32_t size = 0;
      std::memcpy(&size, all.data() + u * sizeof size, sizeof size);
      EXPECT_LE(size, slot_bytes_);
      const auto slot = all.begin() + static_cast<std::ptrdiff_t>(table_bytes() + u * slot_bytes_);
      found.emplace_back(
          slot, slot + static_cast<std::ptrdiff_t>(std::min<std::size_t>(size, slot_bytes_)));
    }
    return found;
  }

 private:
  std::size_t table_bytes() const { return aligned(sizeof(std::uint32_t) * units_); }

  std::size_t units_, slot_bytes_;
  DeviceArray<std::byte> bytes_;
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
