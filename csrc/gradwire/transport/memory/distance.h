// Measures how far away a peer's cache is: how long a cache line that the peer wrote last takes to
// arrive. Two cores may share a cache, or be in two parts of a machine, and schedulers and
// hypervisors move ranks while they run. So a reader keeps timing its first access to a message,
// whose first line the sender wrote last.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <utility>

namespace gradwire::transport {

// Decides whether a peer is far, by the fraction of slow lines: an interrupt or a page walk slows
// some lines of a near peer, and lines of a far one are fast where they had left its cache or were
// prefetched.
class LineTimes {
 public:
  // Adds a time. Returns whether that changes far().
  bool add(double nanoseconds) noexcept {
    slow_ += ((nanoseconds > kSlow ? 1 : 0) - slow_) / kRemembered;
    return std::exchange(far_, slow_ > (far_ ? kStillFar : kFar)) != far_;
  }
  bool far() const noexcept { return far_; }

 private:
  // In nanoseconds. On an AMD Zen 4, a line takes 10 to 40 ns between two cores that share a
  // third-level cache, and 100 to 160 ns between others.
  static constexpr double kSlow = 85;
  static constexpr double kFar = 0.25, kStillFar = 0.1;  // share of slow lines
  static constexpr double kRemembered = 16;              // lines, the weight of the past

  double slow_ = 0;
  bool far_ = false;
};

// Times the first access to a line. Not usable where the clock is too coarse or too slow.
class LineClock {
 public:
  LineClock() noexcept {
    std::array<double, 16> empty;
    for (double& each : empty) each = time([] {});
    std::ranges::sort(empty);
    overhead_ = empty[empty.size() / 2];
  }
  bool usable() const noexcept { return overhead_ > 0 && overhead_ < kMostOverhead; }
  // Returns nanoseconds.
  double first_look(const std::byte* line) const noexcept {
    return time([=] { static_cast<void>(*static_cast<const volatile std::byte*>(line)); }) -
           overhead_;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr double kMostOverhead = 100;  // nanoseconds; a system call takes more

  template <typename Look>
  static double time(Look look) noexcept {
    const auto start = Clock::now();
    look();
    return std::chrono::duration<double, std::nano>(Clock::now() - start).count();
  }

  double overhead_;
};

}  // namespace gradwire::transport
