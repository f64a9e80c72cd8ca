// fp16 and bf16 (codec/cast.cc), as codecs and as element types of arrays.
#pragma once

#include "gradwire/codec/simd/simd.h"
#include "gradwire/codec/simd/simd_random.h"
#include "gradwire/codec/simd/simd_sweep.h"

namespace gradwire::codec {
namespace {

// Lanes of a 16-bit float, whose arithmetic is done in float32.
template <typename Cast>
struct Narrow {
  using Value = float;
  using V = F32;
  static constexpr std::size_t kCount = kLanes;
  static constexpr std::size_t kBytes = sizeof(std::uint16_t);

  static V load(const std::byte* p) { return Cast::widen(Halves::load(p)); }
  static void store(std::byte* p, V v) { Halves::store(p, Cast::narrow(v)); }
};

struct Fp16 {
  static constexpr float kLargest = 65504.0F;
  static U16 narrow(F32 x) { return half_from_float(x); }
  static F32 widen(U16 h) { return float_from_half(h); }
};

struct Bf16 {
  static constexpr float kLargest = 0x1.FEp127F;
  static U16 narrow(F32 x) {
    const U32 u = bits<U32>(x);
    const U32 rounded = u + 0x7FFFU + ((u >> 16) & 1U);
    return codec::narrow((x == x ? rounded : u | 0x400000U) >> 16);
  }
  static F32 widen(U16 h) { return bits<F32>(codec::widen(h) << 16); }
};

template <typename Cast, bool kResidual, bool kError>
void encode_from(Source<kResidual> source, float scale, std::byte* out, float* error,
                 std::size_t n) noexcept {
  const float unscale = 1.0F / scale;
  const auto limit = bits<std::int32_t>(Cast::kLargest * unscale);
  sweep<kLanes>(n, [=](std::size_t i, auto part) {
    const F32 v = source(i, part);
    const U16 h = Cast::narrow(saturate(v, limit) * scale);
    store<Halves>(out, i, part, h);
    if constexpr (kError) store<Floats>(error, i, part, lost(v, Cast::widen(h) * unscale));
  });
}

template <typename Cast>
void encode(const float* x, const float* residual, float scale, std::byte* out, float* error,
            std::size_t n) noexcept {
  by_presence(residual, error, [=](auto has_residual, auto has_error) {
    encode_from<Cast, has_residual.value, has_error.value>({x, residual}, scale, out, error, n);
  });
}

template <typename Cast, bool kAdd>
bool decode(const std::byte* in, float scale, float* y, std::size_t n) noexcept {
  const float unscale = 1.0F / scale;
  FiniteCheck check;
  sweep<kLanes>(n, [&](std::size_t i, auto part) {
    const F32 decoded = Cast::widen(load<Halves>(in, i, part)) * unscale;
    check.see(decoded);
    F32 sum = decoded;
    if constexpr (kAdd) sum = Sum::apply<float>(load<Floats>(y, i, part), decoded);
    store<Floats>(y, i, part, sum);
  });
  return check.holds();
}

// Adds 16 random bits to x, then cuts its last 16 bits off: the result is a step up in magnitude
// with the probability that the cut bits stand for. Blocks of kRandomBlock elements begin at
// multiples of it, wherever a run begins.
constexpr std::size_t kRandomBlock = 4096;

[[gnu::flatten]] void bf16_at_random(const float* x, const RandomPosition& position, std::byte* out,
                                     std::size_t n) noexcept {
  constexpr std::int32_t kMost = 0x7F7FFFFF;
  RandomBits random(position);
  for (std::size_t done = 0; done < n;) {
    const std::size_t offset = (position.element + done) % kRandomBlock;
    const std::size_t left = kRandomBlock - offset;
    const std::size_t count = n - done < left ? n - done : left;
    random.start_block(position.element + done - offset);
    sweep<kLanes>(count, [=](std::size_t i, auto part) {
      const F32 v = load<Floats>(x + done, i, part);
      const I32 magnitude = magnitude_of(v);
      const I32 raised = magnitude + bits<I32>(random(offset + i) >> 16);
      const I32 limited = raised > kMost ? (I32{} | kMost) : raised;
      const U32 rounded = bits<U32>(limited | (bits<I32>(v) ^ magnitude));
      store<Halves>(out + done * Halves::kBytes, i, part, codec::narrow(rounded >> 16));
    });
    done += count;
  }
}

template <typename Cast>
constexpr CastKernels kCastOf = {encode<Cast>, decode<Cast, false>, decode<Cast, true>};

}  // namespace
}  // namespace gradwire::codec
