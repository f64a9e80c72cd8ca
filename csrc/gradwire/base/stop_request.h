// StopRequest: a process's request that its job stop, because of a signal or a time limit. Any
// thread, and a signal handler, may use it.
#pragma once

#include <atomic>
#include <chrono>
#include <limits>

namespace gradwire {

class StopRequest {
 public:
  void make() noexcept { made_ = true; }
  // Makes the request at that time, in seconds since 1970.
  void make_at(double seconds) noexcept { at_ = seconds; }
  // Once true, it stays so, even if the clock is set back.
  bool made() const noexcept {
    const double at = at_;
    if (!made_ && at < kNever && now() >= at) made_ = true;
    return made_;
  }

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();
  static double now() noexcept {
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch())
        .count();
  }

  mutable std::atomic<bool> made_{false};
  std::atomic<double> at_{kNever};
};

}  // namespace gradwire
