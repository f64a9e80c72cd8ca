// Vectors of GRADWIRE_VECTOR_BYTES bytes, or plain values where that is 0. Included by
// simd_<isa>.cc after it defines the macro, before simd_kernels.h. Everything is in the anonymous
// namespace, and nothing here may instantiate an inline function of the standard library: the
// linker would keep one copy of it for the whole program, perhaps this one, with instructions the
// processor lacks.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradwire::codec {
namespace {

#if GRADWIRE_VECTOR_BYTES > 0
template <typename T, std::size_t N>
struct VectorOf {
  typedef T type __attribute__((vector_size(sizeof(T) * N)));
};
template <typename T, std::size_t N>
using Vector = typename VectorOf<T, N>::type;
template <typename T>
constexpr std::size_t kLanesOf = GRADWIRE_VECTOR_BYTES / sizeof(T);
#else
template <typename T, std::size_t N>
using Vector = T;
template <typename T>
constexpr std::size_t kLanesOf = 1;
#endif

constexpr std::size_t kLanes = kLanesOf<float>;
using F32 = Vector<float, kLanes>;
using I32 = Vector<std::int32_t, kLanes>;
using U32 = Vector<std::uint32_t, kLanes>;
using U16 = Vector<std::uint16_t, kLanes>;

template <typename To, typename From>
To bits(From from) {
  return __builtin_bit_cast(To, from);
}

// Each simd_<isa>.cc defines these five.

// Round to nearest even, overflow to Inf; NaN keeps its sign and top payload bits and becomes
// quiet.
U16 half_from_float(F32 x);
F32 float_from_half(U16 h);
// Both keep values, which must be below 2^16, unchanged.
U16 narrow(U32 x);
U32 widen(U16 x);
// Returns the larger of each pair. (GCC 12 makes a comparison and a blend of a > b ? a : b.)
I32 larger(I32 a, I32 b);

}  // namespace
}  // namespace gradwire::codec
