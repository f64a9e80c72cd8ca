// Copies of memory: into the caches, or past them.
#pragma once

#include <cstddef>

namespace gradwire {

// The ranges do not overlap; null is fine for no bytes.
using Copy = void (*)(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;

void copy_cached(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;

// Copies with streaming stores, which leave no line in this core's cache; for readers to
// whom a line from there would take longer than from memory. All of them are done on return, so
// that a release store orders them as it does others. Where the processor has none: copy_cached().
void copy_streaming(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;

}  // namespace gradwire
