// Tells whether this is still the process that made an object. Every call of the library asks this,
// and getpid() would be a system call, so forks are counted instead.
#pragma once

#include <cstdint>

namespace gradwire {

// Returns how many forks lie between the process that loaded the library and this one.
std::uint32_t forks() noexcept;

}  // namespace gradwire
