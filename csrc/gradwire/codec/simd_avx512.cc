#include <immintrin.h>

#define GRADWIRE_VECTOR_BYTES 64
#include "gradwire/codec/simd_kernels.h"
#include "gradwire/codec/simd_tables.h"

namespace gradwire::codec {
namespace {

// All lanes. (GCC 12 warns of its own header in the forms without a mask: its bug 105593.)
constexpr __mmask16 kEvery = 0xFFFF;

U16 half_from_float(F32 x) {
  return bits<U16>(_mm512_maskz_cvtps_ph(kEvery, x, _MM_FROUND_TO_NEAREST_INT));
}
F32 float_from_half(U16 h) { return _mm512_maskz_cvtph_ps(kEvery, bits<__m256i>(h)); }

U16 narrow(U32 x) { return bits<U16>(_mm512_maskz_cvtepi32_epi16(kEvery, bits<__m512i>(x))); }
U32 widen(U16 x) { return bits<U32>(_mm512_maskz_cvtepu16_epi32(kEvery, bits<__m256i>(x))); }

Codes pack(const Parts<U32>& lanes) {
  Codes codes;
  each_part([&](std::size_t k) {
    put(codes.byte + 16 * k, _mm512_maskz_cvtepi32_epi8(kEvery, bits<__m512i>(lanes[k])));
  });
  return codes;
}
Group unpack(const Codes& codes) {
  Group values;
  each_part([&](std::size_t k) {
    const auto sixteen = get<__m128i>(codes.byte + 16 * k);
    values[k] = _mm512_maskz_cvtepi32_ps(kEvery, _mm512_maskz_cvtepi8_epi32(kEvery, sixteen));
  });
  return values;
}

}  // namespace

constexpr Kernels kAvx512Kernels = table("avx512");

}  // namespace gradwire::codec
