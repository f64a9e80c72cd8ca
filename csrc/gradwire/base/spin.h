// What a thread does between two reads of a word that another thread will write.
#pragma once

namespace gradwire {

// Yields this core's resources to its other hardware thread for a moment. The compiler then reads
// memory anew.
inline void pause_spinning() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// How often a thread that waits yields its core after it has spun, and before it sleeps.
inline constexpr unsigned kYields = 20;

}  // namespace gradwire
