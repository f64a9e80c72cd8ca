// What tests of codecs' kernels share: feedback on the device, and values of all kinds.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "codec_reference.h"
#include "cuda_arrays.h"

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
        entry_({Entry{.which = which, .which_memory = 0, .calls = calls, .adapted = {}}}) {}

  Site site() const { return {{residuals_[0].data(), residuals_[1].data()}, entry_.data()}; }
  std::vector<float> before() const { return residuals_[which_].values(); }
  std::vector<float> after() const { return residuals_[which_ ^ 1U].values(); }
  Entry entry() const { return entry_.value(); }

 private:
  static std::vector<float> poison(std::size_t n) { return std::vector<float>(n, 7.0F); }

  std::uint32_t which_;
  DeviceArray<float> residuals_[2];
  DeviceArray<Entry> entry_;
};

// Values of every kind that kernels could treat wrongly.
struct Family {
  const char* name;
  float (*draw)(std::size_t i, std::mt19937_64& random);
};

inline float normal(std::size_t, std::mt19937_64& random) {
  return codec::draw_float(codec::Data::kNormal, random);
}

inline constexpr float kMost = std::numeric_limits<float>::max();
inline constexpr float kLeast = std::numeric_limits<float>::denorm_min();

// Those before the last three are all finite.
inline constexpr Family kFamilies[] = {
    {"normal", normal},
    {"huge", [](std::size_t, auto& random) { return draw_float(codec::Data::kHuge, random); }},
    {"denormal",
     [](std::size_t, auto& random) { return draw_float(codec::Data::kDenormal, random); }},
    {"zero", [](std::size_t, auto&) { return 0.0F; }},
    {"signed zeros", [](std::size_t i, auto&) { return i % 3 == 0 ? -0.0F : 0.0F; }},
    {"constant", [](std::size_t, auto&) { return -0.3F; }},
    {"largest of both signs",
     [](std::size_t, auto& random) { return random() % 2 ? kMost : -kMost; }},
    {"least", [](std::size_t i, auto&) { return i % 2 == 0 ? kLeast : -kLeast; }},
    {"from least to largest",
     [](std::size_t, auto& random) {
       const float value = draw_float(codec::Data::kRandomBits, random);
       return std::isfinite(value) ? value : 0x1p-100F;
     }},
    {"one in 20 is zero",
     [](std::size_t i, auto& random) { return random() % 20 ? normal(i, random) : 0.0F; }},
    {"one in 10 is zero",
     [](std::size_t i, auto& random) { return random() % 10 ? normal(i, random) : -0.0F; }},
    {"one in 3 is zero",
     [](std::size_t i, auto& random) { return random() % 3 ? normal(i, random) : 0.0F; }},
    {"one in 20 is not zero",
     [](std::size_t i, auto& random) { return random() % 20 ? -0.0F : normal(i, random); }},
    {"one in 400 is not zero",
     [](std::size_t i, auto& random) { return random() % 400 ? 0.0F : normal(i, random); }},
    {"one in 400 is not finite",
     [](std::size_t i, auto& random) {
       constexpr float kBad[] = {NAN, -NAN, INFINITY, -INFINITY};
       return random() % 400 ? normal(i, random) : kBad[random() % 4];
     }},
    {"special",
     [](std::size_t, auto& random) { return draw_float(codec::Data::kSpecial, random); }},
    {"random bits",
     [](std::size_t, auto& random) { return draw_float(codec::Data::kRandomBits, random); }},
};

inline std::vector<float> draw(const Family& family, std::size_t n, std::mt19937_64& random) {
  std::vector<float> values(n);
  for (std::size_t i = 0; i < n; ++i) values[i] = family.draw(i, random);
  return values;
}

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
