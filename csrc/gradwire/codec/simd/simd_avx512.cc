#include <immintrin.h>

#define GRADWIRE_VECTOR_BYTES 64
#include "gradwire/codec/simd/simd_kernels.h"
#include "gradwire/codec/simd/simd_tables.h"

namespace gradwire::codec {
namespace {

// A mask of all lanes. (GCC 12 warns of its own header in the forms without a mask: its bug
// 105593.)
constexpr __mmask16 kEvery = 0xFFFF;

U16 half_from_float(F32 x) {
  return bits<U16>(_mm512_maskz_cvtps_ph(kEvery, x, _MM_FROUND_TO_NEAREST_INT));
}
F32 float_from_half(U16 h) { return _mm512_maskz_cvtph_ps(kEvery, bits<__m256i>(h)); }

U16 narrow(U32 x) { return bits<U16>(_mm512_maskz_cvtepi32_epi16(kEvery, bits<__m512i>(x))); }
U32 widen(U16 x) { return bits<U32>(_mm512_maskz_cvtepu16_epi32(kEvery, bits<__m256i>(x))); }

I32 larger(I32 a, I32 b) {
  return bits<I32>(_mm512_maskz_max_epi32(kEvery, bits<__m512i>(a), bits<__m512i>(b)));
}

void pack(const Parts<U32>& lanes, std::byte* to) {
  each_part([&](std::size_t k) {
    put(to + 16 * k, _mm512_maskz_cvtepi32_epi8(kEvery, bits<__m512i>(lanes[k])));
  });
}
F32 unpack(const std::byte* from) {
  const __m512i sixteen = _mm512_maskz_cvtepi8_epi32(kEvery, get<__m128i>(from));
  return _mm512_maskz_cvtepi32_ps(kEvery, sixteen);
}

void pack_half(const HalfGroup& lanes, std::byte* to) {
  put(to, _mm512_maskz_cvtepi32_epi8(kEvery, bits<__m512i>(lanes.part[0])));
}
U32 unpack_bytes(const std::byte* from) {
  return bits<U32>(_mm512_maskz_cvtepu8_epi32(kEvery, get<__m128i>(from)));
}
F32 pick(const SixteenValues& values, U32 lanes) {
  return _mm512_maskz_permutexvar_ps(kEvery, bits<__m512i>(lanes), values.part[0]);
}
U32 larger(U32 a, U32 b) {
  return bits<U32>(_mm512_maskz_max_epu32(kEvery, bits<__m512i>(a), bits<__m512i>(b)));
}

std::uint32_t sign_bits(F32 v) { return _mm512_movepi32_mask(bits<__m512i>(v)); }
F32 by_sign(F32 v, F32 if_clear, F32 if_set) {
  return _mm512_mask_mov_ps(if_clear, _mm512_movepi32_mask(bits<__m512i>(v)), if_set);
}
F32 by_bits(std::uint32_t word, std::size_t k, F32 if_clear, F32 if_set) {
  return _mm512_mask_mov_ps(if_clear, static_cast<__mmask16>(word >> (16 * k)), if_set);
}
F32 look_up(const SixteenValues& values, const std::uint32_t* fours, std::size_t k) {
  const __m128i four = _mm_loadu_si128(reinterpret_cast<const __m128i*>(fours));
  const U32 begin = {0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12};
  const U32 number = bits<U32>(_mm512_maskz_broadcast_i32x4(kEvery, four)) >>
                     (begin + static_cast<std::uint32_t>(16 * k));
  return _mm512_maskz_permutexvar_ps(kEvery, bits<__m512i>(number), values.part[0]);
}
F32 positive_part(F32 v) { return _mm512_maskz_max_ps(kEvery, F32{}, v); }
F32 negative_part(F32 v) { return _mm512_maskz_min_ps(kEvery, F32{}, v); }

F32 fused(F32 a, F32 b, F32 c) { return _mm512_maskz_fmadd_ps(kEvery, a, b, c); }
F32 root(F32 x) { return _mm512_maskz_sqrt_ps(kEvery, x); }

std::uint32_t compress(std::uint32_t word, std::uint32_t mask) { return _pext_u32(word, mask); }
std::uint32_t expand(std::uint32_t packed, std::uint32_t mask) { return _pdep_u32(packed, mask); }

}  // namespace

constexpr Kernels kAvx512Kernels = table("avx512");

}  // namespace gradwire::codec
