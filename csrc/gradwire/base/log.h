// Log: receives the core's messages that no call would report in time, one line each.
#pragma once

#include <functional>
#include <string_view>

namespace gradwire {

using Log = std::function<void(std::string_view line)>;

// Writes "gradwire: LINE" to standard error, in one write. It takes no lock and never blocks: a
// line for which a full pipe has no room is lost.
void log_to_stderr(std::string_view line) noexcept;

}  // namespace gradwire
