// Errors as control frames and back, so that every rank raises the same root cause.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

#include "gradwire/base/error.h"
#include "gradwire/base/types.h"
#include "gradwire/transport/control.h"

namespace gradwire::exec {

// Thrown by a driver whose caller was interrupted; carries what the caller wants rethrown.
struct Interruption {
  std::exception_ptr cause;
};

// Thrown by a driver that another rank told why to fail: nothing is left to find out.
struct RootCause {
  std::exception_ptr error;
};

// Thrown by a driver that found another rank to have made another call than its own: in `call`, or
// before it. `what` serves where the ranks' answers do not tell more.
struct Disagreement {
  std::uint32_t call = 0;
  std::string what;
  // Where the calls differ in nothing but the size of a block: who sends it, and the bytes that
  // this rank expects.
  Rank sender = kNoPeer;
  std::uint64_t expected = 0;
};

transport::ControlFrame failure_frame(const std::exception_ptr& error, Rank rank) noexcept;
std::exception_ptr error_of(const transport::ControlFrame& failure);

}  // namespace gradwire::exec
