// What this processor can do, beyond the instruction sets that codec/simd chooses from.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace gradwire {

// Returns whether it has instructions for AES and for GCM's multiplication.
inline bool has_aes() noexcept {
#if defined(__x86_64__)
  constexpr unsigned kWanted = bit_AES | bit_PCLMUL;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & kWanted) == kWanted;
#elif defined(__aarch64__)
  constexpr unsigned long kWanted = HWCAP_AES | HWCAP_PMULL;
  return (::getauxval(AT_HWCAP) & kWanted) == kWanted;
#else
  return false;
#endif
}

}  // namespace gradwire
