// Log: what the core has to tell that no caller will hear of in time, one line at a time.
#pragma once

#include <functional>
#include <string_view>

namespace gradwire {

using Log = std::function<void(std::string_view line)>;

// Writes "gradwire: LINE" to standard error, in one write. It takes no lock and never blocks: a
// line for which a full pipe has no room is lost.
void log_to_stderr(std::string_view line) noexcept;

}  // namespace gradwire
