// Copies of memory, into the caches or past them.
#pragma once

#include <cstddef>

namespace gradwire {

// The ranges must not overlap. Null is allowed where `bytes` is 0.
using Copy = void (*)(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;

void copy_cached(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;

// Copies with streaming stores, which bypass this core's cache: for readers that fetch a line
// faster from memory than from this cache. Ends with a store fence, so that a later release store
// orders these stores too. The same as copy_cached() where the processor has no such stores.
void copy_streaming(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;

}  // namespace gradwire
