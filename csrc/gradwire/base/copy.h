// Copies of memory: into the caches, or past them.
#pragma once

#include <cstddef>

namespace gradwire {

// The ranges must not overlap. Null is allowed where `bytes` is 0.
using Copy = void (*)(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;

void copy_cached(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;

// Copies with streaming stores, which leave no line in this core's cache: for readers that would
// take longer to fetch a line from this cache than from memory. All stores are done on return, so a
// later release store orders them like any other. Does what copy_cached() does where the processor
// has no such stores.
void copy_streaming(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;

}  // namespace gradwire
