#include "gradwire/base/copy.h"

#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace gradwire {

void copy_cached(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

#ifdef __SSE2__
namespace {

constexpr std::size_t kLine = 64;   // bytes; a partial line would cost a separate memory write
constexpr std::size_t kFew = 1024;  // bytes; smaller copies are not worth the wait for their stores

void stream_line(std::byte* to, const std::byte* from) noexcept {
  for (std::size_t at = 0; at < kLine; at += sizeof(__m128i))
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + at),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at)));
}

}  // namespace

void copy_streaming(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  if (bytes < kFew) return copy_cached(to, from, bytes);
  const std::size_t before = -reinterpret_cast<std::uintptr_t>(to) % kLine;
  copy_cached(to, from, before);
  std::size_t at = before;
  for (; at + kLine <= bytes; at += kLine) stream_line(to + at, from + at);
  copy_cached(to + at, from + at, bytes - at);
  _mm_sfence();
}
#else
void copy_streaming(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  copy_cached(to, from, bytes);
}
#endif

}  // namespace gradwire
