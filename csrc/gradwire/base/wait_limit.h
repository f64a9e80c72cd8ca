// WaitLimit: when a wait ends, by a deadline or by the caller's interrupt (Ctrl-C, abort()).
#pragma once

#include <functional>
#include <utility>

#include "gradwire/base/deadline.h"

namespace gradwire {

class WaitLimit {
 public:
  // Called now and then by a thread that waits; throws to end the wait, as Ctrl-C does.
  using Interrupt = std::function<void()>;

  WaitLimit(Deadline deadline, Interrupt interrupt = nullptr)
      : deadline_(deadline), interrupt_(std::move(interrupt)) {}

  bool passed() const { return deadline_.passed(); }
  // The timeout for poll() in one turn of the wait. Call check_interrupt() after each turn.
  int turn_milliseconds() const { return deadline_.milliseconds_left(kTurnMilliseconds); }
  void check_interrupt() const {
    if (interrupt_) interrupt_();
  }
  WaitLimit until(const Deadline& deadline) const {
    return {std::min(deadline_, deadline), interrupt_};
  }
  // The same interrupt, and the earlier of the two deadlines.
  WaitLimit within(double seconds) const {
    return {std::min(deadline_, Deadline::after(seconds)), interrupt_};
  }

 private:
  // So that an interrupt acts within 0.2 s, even if it comes by way of another thread.
  static constexpr int kTurnMilliseconds = 50;

  Deadline deadline_;
  Interrupt interrupt_;
};

}  // namespace gradwire
