// Arrays of the benchmarks begin on a cache line, as torch's do: what malloc gives for large ones
// lies 16 bytes after one. Included by a program's one source file.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

inline constexpr std::size_t kCacheLine = 64;

void* operator new(std::size_t size) {
  void* memory = std::aligned_alloc(kCacheLine, (size + kCacheLine - 1) / kCacheLine * kCacheLine);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
