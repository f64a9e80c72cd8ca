// Runs a call that may never return, such as one into a hung driver, on its own thread.
#pragma once

#include <functional>

namespace gradwire {

// Returns whether `call` finished within `seconds`. If it did not, its thread is detached and goes
// on. Exceptions of `call` are dropped.
bool run_with_timeout(double seconds, std::function<void()> call);

}  // namespace gradwire
