// The reference: plain C++ without vectors, conversions in integer arithmetic.
#define GRADWIRE_VECTOR_BYTES 0
#include "gradwire/codec/simd/simd_kernels.h"
#include "gradwire/codec/simd/simd_tables.h"

namespace gradwire::codec {
namespace {

// Returns `value` without its last `shift` bits (1 to 24), rounded to nearest even.
std::uint32_t shift_to_even(std::uint32_t value, std::uint32_t shift) {
  const std::uint32_t half = 1U << (shift - 1);
  return (value + half - 1 + ((value >> shift) & 1U)) >> shift;
}

U16 half_from_float(F32 x) {
  const auto u = bits<std::uint32_t>(x);
  const std::uint32_t magnitude = u & 0x7FFFFFFFU;
  std::uint32_t h = 0;
  if (magnitude > 0x7F800000U) {  // NaN
    h = 0x7E00U | ((magnitude >> 13) & 0x3FFU);
  } else if (magnitude >= 0x47800000U) {  // 65536 and above; rounding takes care of [65520, 65536)
    h = 0x7C00U;
  } else if (magnitude >= 0x38800000U) {  // normal: the exponent's bias goes from 127 to 15
    h = shift_to_even(magnitude - (112U << 23), 13);
  } else if (magnitude >= 0x33000000U) {  // denormal, in units of 2^-24; 2^-25 ties to zero
    h = shift_to_even((magnitude & 0x7FFFFFU) | 0x800000U, 126 - (magnitude >> 23));
  }
  return static_cast<U16>(((u >> 16) & 0x8000U) | h);
}

F32 float_from_half(U16 h) {
  const std::uint32_t sign = (h & 0x8000U) << 16;
  const std::uint32_t exponent = (h >> 10) & 0x1FU, mantissa = h & 0x3FFU;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
    return bits<F32>(sign | bits<std::uint32_t>(magnitude));
  }
  if (exponent < 31) return bits<F32>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const std::uint32_t quiet = mantissa == 0 ? 0 : 0x400000U;
  return bits<F32>(sign | 0x7F800000U | quiet | (mantissa << 13));
}

U16 narrow(U32 x) { return static_cast<U16>(x); }
U32 widen(U16 x) { return x; }

I32 larger(I32 a, I32 b) { return a > b ? a : b; }

void pack(const Parts<U32>& lanes, std::byte* to) {
  for (std::size_t i = 0; i < kGroup; ++i) to[i] = static_cast<std::byte>(lanes[i]);
}
F32 unpack(const std::byte* from) { return static_cast<std::int8_t>(*from); }

void pack_half(const HalfGroup& lanes, std::byte* to) {
  for (std::size_t i = 0; i < kGroup / 2; ++i) to[i] = static_cast<std::byte>(lanes.part[i]);
}
U32 unpack_bytes(const std::byte* from) { return static_cast<std::uint8_t>(*from); }
F32 pick(const SixteenValues& values, U32 lanes) { return values.part[lanes & 0xFU]; }
U32 larger(U32 a, U32 b) { return a > b ? a : b; }

std::uint32_t sign_bits(F32 v) { return bits<std::uint32_t>(v) >> 31; }
F32 by_sign(F32 v, F32 if_clear, F32 if_set) { return sign_bits(v) != 0 ? if_set : if_clear; }
F32 by_bits(std::uint32_t word, std::size_t k, F32 if_clear, F32 if_set) {
  return ((word >> k) & 1U) != 0 ? if_set : if_clear;
}
F32 look_up(const SixteenValues& values, const std::uint32_t* fours, std::size_t k) {
  return values.part[(fours[k % 4] >> (k / 4 * 4)) & 0xFU];
}
F32 positive_part(F32 v) { return v < 0 ? 0 : v; }
F32 negative_part(F32 v) { return v > 0 ? 0 : v; }

F32 fused(F32 a, F32 b, F32 c) { return __builtin_fmaf(a, b, c); }
F32 root(F32 x) { return __builtin_sqrtf(x); }

std::uint32_t compress(std::uint32_t word, std::uint32_t mask) {
  std::uint32_t packed = 0;
  for (std::uint32_t next = 1; mask != 0; mask &= mask - 1, next <<= 1)
    if ((word & mask & -mask) != 0) packed |= next;
  return packed;
}
std::uint32_t expand(std::uint32_t packed, std::uint32_t mask) {
  std::uint32_t word = 0;
  for (; mask != 0; mask &= mask - 1, packed >>= 1)
    if ((packed & 1U) != 0) word |= mask & -mask;
  return word;
}

}  // namespace

constexpr Kernels kScalarKernels = table("scalar");

}  // namespace gradwire::codec
