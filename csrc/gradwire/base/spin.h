// What a thread does between two looks at a word that another one will write.
#pragma once

namespace gradwire {

// Leaves this core's resources to its other hardware thread for a moment; memory is read anew.
inline void pause_spinning() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

}  // namespace gradwire
