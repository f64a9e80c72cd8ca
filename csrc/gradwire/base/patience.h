// How long a wait may last: until a deadline, or until somebody no longer wants it.
#pragma once

#include <functional>
#include <utility>

#include "gradwire/base/deadline.h"

namespace gradwire {

class Patience {
 public:
  // Called now and then by a thread that waits; throws to end the wait, as Ctrl-C does.
  using Interrupt = std::function<void()>;

  Patience(Deadline deadline, Interrupt interrupt = nullptr)
      : deadline_(deadline), interrupt_(std::move(interrupt)) {}

  bool passed() const { return deadline_.passed(); }
  // For poll(): how long a turn of the wait may last. After each, require().
  int turn_milliseconds() const { return deadline_.milliseconds_left(kTurnMilliseconds); }
  void require() const {
    if (interrupt_) interrupt_();
  }
  Patience until(const Deadline& deadline) const {
    return {std::min(deadline_, deadline), interrupt_};
  }
  // As patient, but no longer than that.
  Patience within(double seconds) const {
    return {std::min(deadline_, Deadline::after(seconds)), interrupt_};
  }

 private:
  // So that an interrupt acts within 0.2 s, even if it comes by way of another thread.
  static constexpr int kTurnMilliseconds = 50;

  Deadline deadline_;
  Interrupt interrupt_;
};

}  // namespace gradwire
