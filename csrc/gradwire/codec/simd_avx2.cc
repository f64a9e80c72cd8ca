#include <immintrin.h>

#define GRADWIRE_VECTOR_BYTES 32
#include "gradwire/codec/simd_kernels.h"
#include "gradwire/codec/simd_tables.h"

namespace gradwire::codec {
namespace {

U16 half_from_float(F32 x) { return bits<U16>(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
F32 float_from_half(U16 h) { return _mm256_cvtph_ps(bits<__m128i>(h)); }

U16 narrow(U32 x) {
  const auto v = bits<__m256i>(x);
  return bits<U16>(_mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
}
U32 widen(U16 x) { return bits<U32>(_mm256_cvtepu16_epi32(bits<__m128i>(x))); }

}  // namespace

constexpr Kernels kAvx2Kernels = table("avx2");

}  // namespace gradwire::codec
