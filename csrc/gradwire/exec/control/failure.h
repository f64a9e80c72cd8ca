// Converts errors to control frames and back, so that every rank raises the same root cause.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

#include "gradwire/base/error.h"
#include "gradwire/base/types.h"
#include "gradwire/exec/control/identity.h"
#include "gradwire/transport/control.h"

namespace gradwire::exec {

// Thrown by a driver whose caller's interrupt has thrown `cause`, which the caller wants rethrown.
struct Interruption {
  std::exception_ptr cause;
};

// Thrown by a driver when another rank has sent the failure's root cause.
struct RootCause {
  std::exception_ptr error;
};

// Thrown by a driver when another rank made another call than this one, in `call` or before it.
// `what` describes that, for when the ranks' answers do not tell more.
struct Disagreement {
  std::uint32_t call = 0;
  std::string what;
  // Set if the calls differ in nothing but the size of a block: who sends it, and the bytes that
  // this rank expects.
  Rank sender = kNoPeer;
  std::uint64_t expected = 0;
};

// Convert an error of rank `rank` to a message, and a message to an error.
transport::ControlFrame failure_frame(const std::exception_ptr& error, Rank rank) noexcept;
std::exception_ptr error_of(const transport::ControlFrame& failure);

// Returns the error with its culprit's rank in the job, which the text names too if that is another
// number than in the communicator.
std::exception_ptr with_job_peer(const std::exception_ptr& error, const Identity& identity);
// Returns whether a failure of one communicator ends the others of its process: the culprit, or the
// program that runs into the failure, will not come to their calls any more. Calls that differ are
// left to the program.
bool fails_family(const transport::ControlFrame& failure) noexcept;
// Returns a failure of communicator `there` as one of `here`, which is in the same process.
transport::ControlFrame translated(transport::ControlFrame failure, const Identity& there,
                                   const Identity& here);

}  // namespace gradwire::exec
