// WaitLimit: what ends a wait: a deadline, or the caller's interrupt (Ctrl-C, abort()).
#pragma once

#include <functional>
#include <utility>

#include "gradwire/base/deadline.h"

namespace gradwire {

// How long a waiting thread waits at most until it calls its interrupt: one acts within 0.2 s, even
// if it comes through another thread.
inline constexpr int kInterruptMilliseconds = 100;

class WaitLimit {
 public:
  // A waiting thread calls it repeatedly. It throws to end the wait.
  using Interrupt = std::function<void()>;

  WaitLimit(Deadline deadline, Interrupt interrupt = nullptr)
      : deadline_(deadline), interrupt_(std::move(interrupt)) {}

  bool passed() const { return deadline_.passed(); }
  // Returns the timeout of one poll() of the wait, after which to call check_interrupt().
  int turn_milliseconds() const { return deadline_.milliseconds_left(kInterruptMilliseconds); }
  void check_interrupt() const {
    if (interrupt_) interrupt_();
  }
  WaitLimit until(const Deadline& deadline) const {
    return {std::min(deadline_, deadline), interrupt_};
  }
  // Returns a limit with the same interrupt and the earlier of the two deadlines.
  WaitLimit within(double seconds) const {
    return {std::min(deadline_, Deadline::after(seconds)), interrupt_};
  }

 private:
  Deadline deadline_;
  Interrupt interrupt_;
};

}  // namespace gradwire
