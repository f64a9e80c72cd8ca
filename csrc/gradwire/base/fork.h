// A count of forks, by which an object knows whether it is used in a fork of the process that made
// it. Every call of the library checks this, and getpid() would be a system call.
#pragma once

#include <cstdint>

namespace gradwire {

// Returns the number of forks from the process that loaded the library to this one.
std::uint32_t forks() noexcept;

}  // namespace gradwire
