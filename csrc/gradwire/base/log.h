// Log: receives the core's messages that no call can report, one line each.
#pragma once

#include <functional>
#include <string_view>

namespace gradwire {

using Log = std::function<void(std::string_view line)>;

// Writes "gradwire: LINE" to standard error, in one write. Takes no lock and never blocks: a line
// is lost where a pipe has no room for it.
void log_to_stderr(std::string_view line) noexcept;

}  // namespace gradwire
