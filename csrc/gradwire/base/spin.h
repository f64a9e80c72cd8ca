// Spinning: what a thread does between two reads of memory that another thread will write.
#pragma once

namespace gradwire {

// Yields the core to its other hardware thread for a moment. A compiler barrier, too.
inline void pause_spinning() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// How many times a waiting thread yields, after it has spun and before it sleeps.
inline constexpr unsigned kYields = 20;

}  // namespace gradwire
