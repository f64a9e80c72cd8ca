// Deadline: an absolute point in time by which a wait must end. A call makes one and passes it on.
#pragma once

#include <algorithm>
#include <chrono>
#include <compare>
#include <ctime>

namespace gradwire {

// The time of steady_clock at its last tick, some milliseconds ago at most; cheap to read.
struct CoarseClock {
  static std::chrono::nanoseconds tick() noexcept {
    static const std::chrono::nanoseconds length = [] {
      timespec tick{};
      ::clock_getres(CLOCK_MONOTONIC_COARSE, &tick);
      return std::chrono::seconds(tick.tv_sec) + std::chrono::nanoseconds(tick.tv_nsec);
    }();
    return length;
  }
  static std::chrono::steady_clock::time_point now() noexcept {
    timespec now{};
    ::clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return std::chrono::steady_clock::time_point(std::chrono::seconds(now.tv_sec) +
                                                 std::chrono::nanoseconds(now.tv_nsec));
  }
};

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  static Deadline never() { return Deadline(Clock::time_point::max()); }
  // Returns a deadline that has always passed.
  static Deadline at_once() { return Deadline(Clock::time_point::min()); }
  // Returns the time `seconds` from now. Zero or less has already passed; more than ten years means
  // never.
  static Deadline after(double seconds) { return after(Clock::now(), seconds); }
  // The same, cheaper, but up to a few milliseconds late.
  static Deadline about(double seconds) {
    return after(CoarseClock::now() + CoarseClock::tick(), seconds);
  }

  // Returns the time `seconds` before this one.
  Deadline earlier(double seconds) const {
    const bool is_extreme = is_never() || *this == at_once();
    return is_extreme ? *this
                      : Deadline(when_ - std::chrono::duration_cast<Clock::duration>(
                                             std::chrono::duration<double>(seconds)));
  }

  auto operator<=>(const Deadline&) const = default;

  bool is_never() const { return when_ == Clock::time_point::max(); }
  bool passed() const { return !is_never() && Clock::now() >= when_; }
  // The same as passed(), cheaper, but up to a few milliseconds late.
  bool passed_about() const { return !is_never() && CoarseClock::now() >= when_; }

  // Returns the milliseconds left, rounded up and at most `cap`, for poll().
  int milliseconds_left(int cap) const {
    if (is_never()) return cap;
    const auto now = Clock::now();
    if (when_ <= now) return 0;  // at_once() is too long ago for a difference
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(when_ - now).count();
    return static_cast<int>(std::min<long long>(left, cap));
  }

 private:
  static Deadline after(Clock::time_point now, double seconds) {
    constexpr double kTenYears = 3.2e8;
    if (seconds >= kTenYears) return never();
    return Deadline(now + std::chrono::duration_cast<Clock::duration>(
                              std::chrono::duration<double>(std::max(seconds, 0.0))));
  }
  explicit Deadline(Clock::time_point when) : when_(when) {}
  Clock::time_point when_;
};

}  // namespace gradwire
