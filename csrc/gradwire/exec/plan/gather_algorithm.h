// The names of algorithms by which payloads, or plain arrays, are gathered and added by every rank.
#pragma once

#include <string_view>

#include "gradwire/exec/plan/request.h"

namespace gradwire::exec {

// "gather", or "gather(ring)" with the algorithm of the all_gather.
bool is_gather(std::string_view algorithm);
// "ring" of "gather(ring)", or "auto".
std::string_view gather_algorithm(std::string_view algorithm);
// For a request whose payloads are gathered. Throws ScheduleError for one that wants them to travel
// otherwise.
std::string_view gather_algorithm(const Request& request);

}  // namespace gradwire::exec
