// How far away a peer's cache is: how long a line that the peer wrote last takes to come from it.
//
// Two cores have a cache in common, or the line has to travel between two parts of a machine. Which
// of these it is can change while ranks run, since schedulers and hypervisors move them. So it is
// measured all the time, in passing: a reader times its first look at a message, whose first line
// the sender wrote last.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <utility>

namespace gradwire::transport {

// Whether a peer is far, from the times of its lines, of which the share of slow ones counts: near
// ones are slow now and then, by an interrupt or a page walk, and far ones fast where they had left
// the peer's cache or were fetched ahead.
class LineTimes {
 public:
  // Says whether the answer is another one now.
  bool add(double nanoseconds) noexcept {
    slow_ += ((nanoseconds > kSlow ? 1 : 0) - slow_) / kRemembered;
    return std::exchange(far_, slow_ > (far_ ? kStillFar : kFar)) != far_;
  }
  bool far() const noexcept { return far_; }

 private:
  // Nanoseconds. Between two cores of an AMD Zen 4 with a common third-level cache a line takes 10
  // to 40, between others 100 to 160.
  static constexpr double kSlow = 85;
  static constexpr double kFar = 0.25, kStillFar = 0.1;  // of all lines
  static constexpr double kRemembered = 16;              // lines

  double slow_ = 0;
  bool far_ = false;
};

// Times the first access to a line. Where the clock is too coarse or takes too long, it has none.
class LineClock {
 public:
  LineClock() noexcept {
    std::array<double, 16> empty;
    for (double& each : empty) each = time([] {});
    std::ranges::sort(empty);
    overhead_ = empty[empty.size() / 2];
  }
  bool usable() const noexcept { return overhead_ > 0 && overhead_ < kMostOverhead; }
  // Nanoseconds.
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
