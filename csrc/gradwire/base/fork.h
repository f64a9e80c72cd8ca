// Whether this is still the process that made something. getpid() is a system call, and every call
// of the library asks.
#pragma once

#include <cstdint>

namespace gradwire {

// How many forks lie between the process that loaded the library and this one.
std::uint32_t forks() noexcept;

}  // namespace gradwire
