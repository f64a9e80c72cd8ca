#include <immintrin.h>

#define GRADWIRE_VECTOR_BYTES 32
#include "gradwire/codec/simd/simd_kernels.h"
#include "gradwire/codec/simd/simd_tables.h"

namespace gradwire::codec {
namespace {

U16 half_from_float(F32 x) { return bits<U16>(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
F32 float_from_half(U16 h) { return _mm256_cvtph_ps(bits<__m128i>(h)); }

U16 narrow(U32 x) {
  const auto v = bits<__m256i>(x);
  return bits<U16>(_mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
}
U32 widen(U16 x) { return bits<U32>(_mm256_cvtepu16_epi32(bits<__m128i>(x))); }

I32 larger(I32 a, I32 b) { return bits<I32>(_mm256_max_epi32(bits<__m256i>(a), bits<__m256i>(b))); }

// Writes the last byte of each lane. The pack instructions work within halves of a register, so
// their result has to be put in order, four bytes at a time.
void pack(const Parts<U32>& lanes, std::byte* to) {
  const auto byte_of = [&](std::size_t k) { return bits<__m256i>(lanes[k] & 0xFFU); };
  const __m256i low = _mm256_packus_epi32(byte_of(0), byte_of(1));
  const __m256i high = _mm256_packus_epi32(byte_of(2), byte_of(3));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  put(to, _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order));
}
F32 unpack(const std::byte* from) {
  const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight));
}

void pack_half(const HalfGroup& lanes, std::byte* to) {
  const auto byte_of = [&](std::size_t k) { return bits<__m256i>(lanes.part[k] & 0xFFU); };
  const __m256i words = _mm256_packus_epi32(byte_of(0), byte_of(1));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5);
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(words, words), order);
  put(to, _mm256_castsi256_si128(bytes));
}
U32 unpack_bytes(const std::byte* from) {
  return bits<U32>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
F32 pick(const SixteenValues& values, U32 lanes) {
  const auto number = bits<__m256i>(lanes);
  return by_sign(bits<F32>(lanes << 28), _mm256_permutevar8x32_ps(values.part[0], number),
                 _mm256_permutevar8x32_ps(values.part[1], number));
}
U32 larger(U32 a, U32 b) { return bits<U32>(_mm256_max_epu32(bits<__m256i>(a), bits<__m256i>(b))); }

std::uint32_t sign_bits(F32 v) { return static_cast<std::uint32_t>(_mm256_movemask_ps(v)); }
F32 by_sign(F32 v, F32 if_clear, F32 if_set) { return _mm256_blendv_ps(if_clear, if_set, v); }
F32 by_bits(std::uint32_t word, std::size_t k, F32 if_clear, F32 if_set) {
  const U32 to_sign = 31 - U32{0, 1, 2, 3, 4, 5, 6, 7} - static_cast<std::uint32_t>(8 * k);
  return by_sign(bits<F32>((U32{} + word) << to_sign), if_clear, if_set);
}
F32 look_up(const SixteenValues& values, const std::uint32_t* fours, std::size_t k) {
  const __m128i four = _mm_loadu_si128(reinterpret_cast<const __m128i*>(fours));
  const U32 begin = U32{0, 0, 0, 0, 4, 4, 4, 4} + static_cast<std::uint32_t>(8 * k);
  const U32 number = bits<U32>(_mm256_broadcastsi128_si256(four)) >> begin;
  const auto lanes = bits<__m256i>(number);
  return by_sign(bits<F32>(number << 28), _mm256_permutevar8x32_ps(values.part[0], lanes),
                 _mm256_permutevar8x32_ps(values.part[1], lanes));
}
F32 positive_part(F32 v) { return _mm256_max_ps(F32{}, v); }
F32 negative_part(F32 v) { return _mm256_min_ps(F32{}, v); }

F32 fused(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }
F32 root(F32 x) { return _mm256_sqrt_ps(x); }

std::uint32_t compress(std::uint32_t word, std::uint32_t mask) { return _pext_u32(word, mask); }
std::uint32_t expand(std::uint32_t packed, std::uint32_t mask) { return _pdep_u32(packed, mask); }

}  // namespace

constexpr Kernels kAvx2Kernels = table("avx2");

}  // namespace gradwire::codec
