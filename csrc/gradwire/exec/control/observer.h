// Observer: what a communicator reports about its collectives while they run, for traces and
// timelines. Without one, a call pays for a comparison.
#pragma once

#include <exception>

#include "gradwire/exec/plan/plan.h"

namespace gradwire::exec {

// Collectives of one communicator run one after the other, so the calls come in this order:
// started, phase, phase, ..., ended, and again. They come on the thread that drives. They may
// neither throw nor block, and must not call the communicator.
class Observer {
 public:
  virtual ~Observer() = default;

  // A collective gets its turn on this rank.
  virtual void started() noexcept = 0;
  // The collective begins a plan: its own, or that of one of the collectives that it is made of.
  virtual void phase(const Plan& plan) noexcept = 0;
  // This rank's part of the collective is over. `failure` is the communicator's, if that ended it,
  // else null.
  virtual void ended(const std::exception_ptr& failure) noexcept = 0;
};

}  // namespace gradwire::exec
