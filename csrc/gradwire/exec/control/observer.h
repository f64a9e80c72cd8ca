// Observer: what a communicator tells of its collectives while they run, for traces and timelines.
// Where there is none, a call pays a comparison.
#pragma once

#include <exception>

#include "gradwire/exec/plan/plan.h"

namespace gradwire::exec {

// Collectives of one communicator run one after the other, so calls of these are started, phase,
// phase, ..., ended, and again. They come on the thread that drives, may neither throw nor block,
// and must not call the communicator.
class Observer {
 public:
  virtual ~Observer() = default;

  // A collective has its turn on this rank.
  virtual void started() noexcept = 0;
  // It begins a plan: the collective itself, or one of those that it is made of.
  virtual void phase(const Plan& plan) noexcept = 0;
  // This rank's part of it is over; with the communicator's failure, if that ended it, else null.
  virtual void ended(const std::exception_ptr& failure) noexcept = 0;
};

}  // namespace gradwire::exec
