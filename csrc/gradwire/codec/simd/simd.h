// The inner loops, in one table per instruction set. Scalar is the reference: every table gives the
// same bytes (binary32, round to nearest even, denormals kept, no FMA but in the update rules, no
// reassociation; see simd_kernels.h).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "gradwire/base/types.h"
#include "gradwire/codec/blocks.h"
#include "gradwire/codec/factors.h"

namespace gradwire::codec {

// acc[i] := acc[i] (op) x[i]. Pointers need no alignment; they may be equal but may not overlap
// otherwise.
using ReduceKernel = void (*)(void* acc, const void* x, std::size_t n) noexcept;
// x[i] := x[i] * factor, rounded once in the element type (float16, bfloat16: through float32).
using ScaleKernel = void (*)(void* x, double factor, std::size_t n) noexcept;

// Kernels of a sum or product of 16-bit floats that is formed in float32 and rounded once.
struct WideKernels {
  void (*begin)(const void* a, const void* b, float* acc, std::size_t n) noexcept;  // a (op) b
  void (*fold)(float* acc, const void* x, std::size_t n) noexcept;  // acc := acc (op) x
  // y := acc * factor, to nearest even.
  void (*round)(const float* acc, float factor, void* y, std::size_t n) noexcept;
};
struct WideTable {
  WideKernels fp16_sum, fp16_prod, bf16_sum, bf16_prod;
};

// float32 to a 16-bit float and back. Payloads need no alignment. `scale` is a power of two in
// [2^-100, 2^100]: it multiplies before the cast and is divided out after decoding, both exactly.
// Round to nearest even; finite values saturate, Inf stays Inf, NaN stays NaN.
struct CastKernels {
  // v[i] = x[i] + residual[i]; error[i] = v[i] - decoded[i], 0 where v[i] is not finite. Either may
  // be null.
  void (*encode)(const float* x, const float* residual, float scale, std::byte* out, float* error,
                 std::size_t n) noexcept;
  // Both return whether all that was decoded is finite.
  bool (*decode)(const std::byte* in, float scale, float* y, std::size_t n) noexcept;
  bool (*decode_add)(const std::byte* in, float scale, float* y, std::size_t n) noexcept;
};

// One step of Adam, with what is alike for all elements.
struct AdamStep {
  float of_mean = 0, of_square = 0, kept_square = 0;  // 1 − β₁, 1 − β₂, β₂
  float root_of_correction = 1;                       // √(1 − β₂ᵗ)
  float epsilon = 0;
  float step = 0;  // γ / (1 − β₁ᵗ)
};

// Update rules of a parameter server (serve/shard/update_rule.h): w and the state, in place, by a
// gradient g. Finite values.
struct RuleKernels {
  void (*sgd)(float* w, const float* g, float rate, std::size_t n) noexcept;
  void (*momentum)(float* w, float* velocity, const float* g, float rate, float momentum,
                   std::size_t n) noexcept;
  void (*nesterov)(float* w, float* velocity, const float* g, float rate, float momentum,
                   std::size_t n) noexcept;
  void (*adagrad)(float* w, float* squares, const float* g, float rate, std::size_t n) noexcept;
  void (*adam)(float* w, float* mean, float* squares, const float* g, const AdamStep& adam,
               std::size_t n) noexcept;
};

// All kernels expect the floating-point state of a FloatEnvironment.
struct Kernels {
  const char* name;  // "scalar", "avx2", "avx512"

  // One per dtype and op (avg is sum here). Null where the op is not defined. Floating results
  // overflow to Inf as IEEE 754 says; min and max are its 2019 minimum and maximum; every NaN
  // result is the positive quiet one without payload; integers wrap; of bools a sum is "or" and a
  // product "and".
  std::array<std::array<ReduceKernel, kReduceOps>, kDTypes> reduce;
  std::array<ScaleKernel, kDTypes> scale;  // null for integers and bool
  WideTable wide;
  bool (*finite)(const float* x, std::size_t n) noexcept;  // whether all values are
  CastKernels fp16;
  CastKernels bf16;
  // Rounds finite float32 to bfloat16, up or down at random, so that the mean of the results is x.
  // What would become infinite becomes the largest finite value. However a run is cut, its bits are
  // the same.
  void (*bf16_at_random)(const float* x, const RandomPosition& position, std::byte* out,
                         std::size_t n) noexcept;
  Int8Kernels int8;
  Int4Kernels int4;
  OneBitKernels one_bit;
  SparseKernels sparse;
  LowRankKernels lowrank;
  LosslessKernels lossless;
  RuleKernels rules;
};

// Returns the tables that this processor can run, best first; scalar is always last.
std::span<const Kernels* const> available_kernels();

// Returns the active table: the best, or the one that GRADWIRE_SIMD names (an unknown or
// unavailable name throws InvalidArgument that lists the available ones). The variable is read once
// per process.
const Kernels& kernels();

// Rounds to nearest and keeps denormals for as long as it lives, whatever modes the thread had
// before.
class FloatEnvironment {
 public:
  FloatEnvironment() noexcept;
  ~FloatEnvironment();
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  std::uint64_t saved_;
};

}  // namespace gradwire::codec
