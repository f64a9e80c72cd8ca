// A call that may never return, on a thread of its own.
#pragma once

#include <functional>

namespace gradwire {

// Whether `call` was over within `seconds`; if not, it goes on alone. What it throws is lost.
bool run_apart(double seconds, std::function<void()> call);

}  // namespace gradwire
