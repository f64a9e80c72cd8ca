// Arrays in a device's memory, and rows of what was found, for these programs and bench/cuda's.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "gradwire/cuda/device.h"

namespace gradwire::cuda {

using Floats = std::vector<float>;
using Payload = std::vector<std::byte>;

struct Device {
  explicit Device(const Api& table) : api(table), own(table), stream(own.get()) {}

  void run(Status status, const char* what) const { check(api, status, what); }
  void copy(void* to, const void* from, std::size_t bytes, CopyKind kind) const {
    run(api.copy(to, from, bytes, kind, stream), "copy");
    run(api.synchronize(stream), "synchronize");
  }

  const Api& api;
  OwnedStream own;
  Stream stream;
};

// Values `shift` elements behind a place that is aligned to all, between guards. To take its memory
// is slow: what is used often is made once, and set.
template <typename T>
class DeviceArray {
 public:
  DeviceArray(const Device& on, const std::vector<T>& values, std::size_t shift = 0)
      : on_(on), shift_(shift), size_(values.size()), room_(on.api) {
    room_.take((kGuard + shift + size_ + kGuard) * sizeof(T));
    set(values);
  }

  // As many others, and the guards anew.
  void set(const std::vector<T>& values) const {
    std::vector<T> all(kGuard + shift_ + size_ + kGuard);
    std::memset(static_cast<void*>(all.data()), kByte, all.size() * sizeof(T));
    if (size_ > 0) std::memcpy(all.data() + kGuard + shift_, values.data(), size_ * sizeof(T));
    on_.copy(room_.data(), all.data(), all.size() * sizeof(T), CopyKind::kToDevice);
  }

  T* data() const { return reinterpret_cast<T*>(room_.data()) + kGuard + shift_; }

  // `intact`: becomes false where something was written around them.
  std::vector<T> values(bool& intact) const {
    std::vector<T> all(kGuard + shift_ + size_ + kGuard);
    on_.copy(all.data(), room_.data(), all.size() * sizeof(T), CopyKind::kToHost);
    const std::size_t begin = (kGuard + shift_) * sizeof(T), end = begin + size_ * sizeof(T);
    const auto* const bytes = reinterpret_cast<const unsigned char*>(all.data());
    const auto changed = [](unsigned char byte) { return byte != kByte; };
    if (std::any_of(bytes, bytes + begin, changed) ||
        std::any_of(bytes + end, bytes + all.size() * sizeof(T), changed))
      intact = false;
    const auto first = all.begin() + static_cast<std::ptrdiff_t>(kGuard + shift_);
    return {first, first + static_cast<std::ptrdiff_t>(size_)};
  }

 private:
  static constexpr std::size_t kGuard = 64;  // elements
  static constexpr int kByte = 0xA5;

  const Device& on_;
  std::size_t shift_, size_;
  Room room_;
};

// For sums that codecs leave to the processor's own addition (codec/topk.cc, threshold.cc,
// lowrank): which NaN it gives is not the same everywhere.
inline Floats with_one_nan(Floats values) {
  for (float& each : values)
    if (std::isnan(each)) each = std::numeric_limits<float>::quiet_NaN();
  return values;
}

// The bytes of up to four elements from `first` on, in the order of memory.
template <typename T>
std::string hex_of(const std::vector<T>& of, std::size_t first) {
  std::string text;
  for (std::size_t i = first; i < of.size() && i < first + 4; ++i) {
    unsigned char bytes[sizeof(T)];
    std::memcpy(bytes, &of[i], sizeof(T));
    if (i > first) text += ' ';
    for (const unsigned char each : bytes) {
      constexpr char kDigits[] = "0123456789abcdef";
      text += {kDigits[each >> 4], kDigits[each & 15]};
    }
  }
  return text;
}

// Checks of one group, which are told as one line of JSON.
class Row {
 public:
  Row(std::string group, std::string which) : group_(std::move(group)), case_(std::move(which)) {}
  ~Row() {
    std::printf("{\"group\": \"%s\", \"case\": \"%s\", \"passed\": %s, \"checks\": %d, ",
                group_.c_str(), case_.c_str(), failure_.empty() ? "true" : "false", checks_);
    if (failure_.empty() && !skipped_.empty()) std::printf("\"skipped\": true, ");
    std::printf("\"detail\": \"%s\"}\n", (failure_.empty() ? skipped_ : failure_).c_str());
    std::fflush(stdout);
  }
  Row(const Row&) = delete;
  Row& operator=(const Row&) = delete;

  void expect(bool holds, const std::string& what) {
    ++checks_;
    if (!holds) fail(what);
  }
  // Bit for bit.
  template <typename T>
  void expect_same(const std::vector<T>& actual, const std::vector<T>& expected,
                   const std::string& what) {
    ++checks_;
    if (actual.size() != expected.size())
      return fail(what + ": " + std::to_string(actual.size()) + " instead of " +
                  std::to_string(expected.size()));
    const auto differs = [&](std::size_t i) {
      return std::memcmp(&actual[i], &expected[i], sizeof(T)) != 0;
    };
    std::size_t first = 0, count = 0;
    for (std::size_t i = actual.size(); i-- > 0;)
      if (differs(i)) first = i, ++count;
    if (count > 0)
      fail(what + ": " + std::to_string(count) + " of " + std::to_string(actual.size()) +
           " differ, from " + std::to_string(first) + " on: " + hex_of(actual, first) +
           " instead of " + hex_of(expected, first));
  }
  void skip(const std::string& why) { skipped_ = why; }
  // The first one is kept.
  void fail(const std::string& what) {
    if (!failure_.empty()) return;
    for (const char each : what)
      failure_ += each == '"' || each == '\\' || each < ' ' ? '\'' : each;
  }

 private:
  std::string group_, case_, failure_, skipped_;
  int checks_ = 0;
};

}  // namespace gradwire::cuda
