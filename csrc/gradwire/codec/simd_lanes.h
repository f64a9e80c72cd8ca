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

template <typename To, typename From>
To convert(From from) {
  return __builtin_convertvector(from, To);
}
#else
template <typename T, std::size_t N>
using Vector = T;
template <typename T>
constexpr std::size_t kLanesOf = 1;

template <typename To, typename From>
To convert(From from) {
  return static_cast<To>(from);
}
#endif

constexpr std::size_t kLanes = kLanesOf<float>;
using F32 = Vector<float, kLanes>;
using U32 = Vector<std::uint32_t, kLanes>;
using U16 = Vector<std::uint16_t, kLanes>;

template <typename To, typename From>
To bits(From from) {
  return __builtin_bit_cast(To, from);
}

// Round to nearest even, overflow to Inf; NaN keeps its sign and top payload bits and becomes
// quiet. Each simd_<isa>.cc defines these two.
U16 half_from_float(F32 x);
F32 float_from_half(U16 h);

}  // namespace
}  // namespace gradwire::codec
