// The inner loops, once per instruction set. Scalar is the reference: every table gives the same bytes
// (binary32, round to nearest even, denormals kept, no FMA, no reassociation; see simd_kernels.h).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "gradwire/base/types.h"

namespace gradwire::codec {

// acc[i] := acc[i] (op) x[i]. Pointers need the alignment of the element type only; they may be equal
// but may not overlap otherwise.
using ReduceKernel = void (*)(void* acc, const void* x, std::size_t n) noexcept;
// x[i] := x[i] * factor, rounded once in the element type (float16, bfloat16: through float32).
using ScaleKernel = void (*)(void* x, double factor, std::size_t n) noexcept;

struct Kernels {
  const char* name;  // "scalar", "avx2", "avx512"

  // By dtype, then by op (avg is sum here). Never null. min and max are IEEE 754-2019 minimum and
  // maximum; NaN results are canonical; integers wrap.
  std::array<std::array<ReduceKernel, kReduceOps>, kDTypes> reduce;
  std::array<ScaleKernel, kDTypes> scale;  // null for integers

  // fp16 saturates finite values at ±65504; both round to nearest even; NaN stays NaN, Inf stays Inf.
  void (*encode_fp16)(const float* x, std::uint16_t* out, float* error, std::size_t n) noexcept;
  void (*encode_bf16)(const float* x, std::uint16_t* out, float* error, std::size_t n) noexcept;
  void (*decode_fp16)(const std::uint16_t* in, float* y, std::size_t n) noexcept;
  void (*decode_bf16)(const std::uint16_t* in, float* y, std::size_t n) noexcept;
  void (*decode_add_fp16)(const std::uint16_t* in, float* y, std::size_t n) noexcept;
  void (*decode_add_bf16)(const std::uint16_t* in, float* y, std::size_t n) noexcept;
};

// The tables this processor can run, best first; scalar is always last.
std::span<const Kernels* const> available_kernels();

// The active one: the best, or the one GRADWIRE_SIMD names (an unknown or unavailable name throws
// InvalidArgument that lists the available ones). Read once per process.
const Kernels& kernels();

// Round to nearest, denormals kept, for as long as it lives, whatever the thread had before.
class FloatEnvironment {
 public:
  FloatEnvironment() noexcept;
  ~FloatEnvironment();
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  unsigned saved_;
};

}  // namespace gradwire::codec
