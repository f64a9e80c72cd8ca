// StopRequest: whether a process asks its job to stop, because a signal came or its time is over.
#pragma once

#include <atomic>
#include <chrono>
#include <limits>

namespace gradwire {

class StopRequest {
 public:
  void make() noexcept { made_ = true; }
  // Makes the request at a time, in seconds since 1970.
  void make_at(double seconds) noexcept { at_ = seconds; }
  bool made() const noexcept {
    const double at = at_;
    return made_ || (at < kNever && now() >= at);
  }

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();
  static double now() noexcept {
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch())
        .count();
  }

  std::atomic<bool> made_{false};
  std::atomic<double> at_{kNever};
};

}  // namespace gradwire
