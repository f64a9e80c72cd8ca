// The names of the algorithms that gather payloads, or plain arrays, and let every rank add them
// up.
#pragma once

#include <string_view>

#include "gradwire/exec/plan/request.h"

namespace gradwire::exec {

// Returns whether it is "gather", or "gather(ring)" with the algorithm of the all_gather.
bool is_gather(std::string_view algorithm);
// Returns "ring" of "gather(ring)", or "auto".
std::string_view gather_algorithm(std::string_view algorithm);
// Returns the same for a request whose payloads are gathered. Throws ScheduleError if the request
// wants them to travel otherwise.
std::string_view gather_algorithm(const Request& request);

}  // namespace gradwire::exec
