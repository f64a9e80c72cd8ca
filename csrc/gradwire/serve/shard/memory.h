// Memory of a shard: how much its process may use, how such amounts are told, and how its values
// lie.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace gradwire::serve {

// Returns the bytes that this process may use: the host's, its control group's or its own limit,
// whichever is least.
std::uint64_t usable_memory();

// Returns `n` values, in huge pages where the system has some: a shard goes through all of its
// values again and again, and would have to look up each small page.
std::vector<float> make_words(std::size_t n, float initial = 0);

// Returns an amount for people: "12.5 GiB".
std::string gibibytes(std::uint64_t bytes);

}  // namespace gradwire::serve
