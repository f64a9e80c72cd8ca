// The floating-point modes of a thread: how it rounds, and whether it keeps denormal numbers.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#elif !defined(__aarch64__)
#error "gradwire runs on x86-64 and ARM64"
#endif

namespace gradwire::codec {

#if defined(__x86_64__)
// Masks all exceptions, rounds to nearest, and sets neither flush-to-zero nor denormals-are-zero.
inline constexpr std::uint64_t kIeeeModes = 0x1F80;
// For tests: the first flushes results and operands to zero, the second rounds down.
inline constexpr std::uint64_t kFlushModes = kIeeeModes | 0x8040;
inline constexpr std::uint64_t kRoundDownModes = 0x2000;
// The other bits are flags, which operations set.
inline constexpr std::uint64_t kModeBits = 0xFFC0;

inline std::uint64_t float_modes() noexcept { return _mm_getcsr(); }
inline void set_float_modes(std::uint64_t modes) noexcept {
  _mm_setcsr(static_cast<unsigned>(modes));
}
#else
inline constexpr std::uint64_t kIeeeModes = 0;
inline constexpr std::uint64_t kFlushModes = 1U << 24;
inline constexpr std::uint64_t kRoundDownModes = 2U << 22;
inline constexpr std::uint64_t kModeBits = ~std::uint64_t{0};

inline std::uint64_t float_modes() noexcept {
  std::uint64_t modes = 0;
  asm volatile("mrs %0, fpcr" : "=r"(modes)::"memory");
  return modes;
}
inline void set_float_modes(std::uint64_t modes) noexcept {
  asm volatile("msr fpcr, %0" ::"r"(modes) : "memory");
}
#endif

}  // namespace gradwire::codec
