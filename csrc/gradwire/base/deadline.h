// An absolute point in time by which a wait must end; one is made per call and handed down.
#pragma once

#include <algorithm>
#include <chrono>
#include <compare>
#include <limits>

namespace gradwire {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  static Deadline never() { return Deadline(Clock::time_point::max()); }
  // Negative or zero means "already passed"; more than ten years means never.
  static Deadline after(double seconds) {
    constexpr double kTenYears = 3.2e8;
    if (seconds >= kTenYears) return never();
    return Deadline(Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                       std::chrono::duration<double>(std::max(seconds, 0.0))));
  }

  Deadline earlier(double seconds) const {
    return is_never() ? *this
                      : Deadline(when_ - std::chrono::duration_cast<Clock::duration>(
                                             std::chrono::duration<double>(seconds)));
  }

  auto operator<=>(const Deadline&) const = default;

  bool is_never() const { return when_ == Clock::time_point::max(); }
  bool passed() const { return !is_never() && Clock::now() >= when_; }

  // For poll(): the milliseconds left, rounded up, at most `cap`.
  int milliseconds_left(int cap) const {
    if (is_never()) return cap;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(when_ - Clock::now()).count();
    return static_cast<int>(std::clamp<long long>(left, 0, cap));
  }

 private:
  explicit Deadline(Clock::time_point when) : when_(when) {}
  Clock::time_point when_;
};

}  // namespace gradwire
