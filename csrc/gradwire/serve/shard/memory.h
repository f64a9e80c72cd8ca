// Memory of a shard: how much its process may use, as text, and in huge pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace gradwire::serve {

// Returns the bytes that this process may use: the least of the host's memory, its control group's
// limit and its own.
std::uint64_t usable_memory();

// Returns `n` values, in huge pages where the system has some: a shard keeps passing through all of
// its values, which would miss the TLB at each small page.
std::vector<float> make_words(std::size_t n, float initial = 0);

// Returns "12.5 GiB".
std::string gibibytes(std::uint64_t bytes);

}  // namespace gradwire::serve
