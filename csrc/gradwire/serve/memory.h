// How much memory a shard's process may use, and how such amounts are told.
#pragma once

#include <cstdint>
#include <string>

namespace gradwire::serve {

// Returns the bytes that this process may use: the host's, its control group's or its own limit,
// whichever is least.
std::uint64_t usable_memory();

// Returns an amount for people: "12.5 GiB".
std::string gibibytes(std::uint64_t bytes);

}  // namespace gradwire::serve
