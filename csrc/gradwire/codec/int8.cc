// int8: per block of elements (the last may be shorter) a float32 scale, then one signed byte an
// element, so that any whole blocks are a payload of their own. v := x + residual, in binary32,
// each operation rounded once:
//   A := max |v| of the block.
//   A is NaN or Inf: scale := NaN, codes 0, errors 0; all of the block decodes to NaN.
//   A < 2^-100: scale := inverse := 0, so that all of v stays in the error.
//   Else scale := min(A / 127, FLT_MAX / 128): no byte decodes to Inf; inverse := 127 / A.
//   q := round(v · inverse); y := q · scale; error := v − y.
// The encoder never writes a scale below 0 or above FLT_MAX / 128: a block with one decodes to NaN.
//
// rounding=nearest: ties to even; |q| <= 127 follows. rounding=stochastic: t := v · inverse limited
// to ±127, q := floor(t) + (u < t − floor(t)), u uniform in [0, 1) with 23 bits, so that the mean
// of q is t to 2^-23. u depends on (seed, call, index of the element in its array) alone: it is
// (h >> 9) / 2^23, h the element's number by codec/simd/simd_random.h, whose blocks are those here.
#include "gradwire/codec/simd/simd.h"
#include "gradwire/codec/spec.h"

namespace gradwire::codec {
namespace {

class Int8 final : public Codec {
 public:
  Int8(const std::string& name, std::size_t block, bool stochastic, std::uint64_t seed)
      : Codec({.name = name,
               .definition = {.kind = Definition::Kind::kInt8,
                              .block = block,
                              .stochastic = stochastic,
                              .seed = seed},
               .block = block,
               .seconds_per_byte = {7e-11, 5e-11}}) {}

  std::size_t max_bytes(std::size_t n) const noexcept override {
    return Int8Kernels::bytes(n, block());
  }

 private:
  std::size_t write(const float* x, std::size_t n, const EncodeContext& context,
                    std::byte* out) const override {
    const RandomPosition position{definition().seed, context.call, context.element};
    kernels().int8.encode(x, context.residual, n, block(),
                          definition().stochastic ? &position : nullptr, out, context.error);
    return max_bytes(n);
  }
  Decoded read(ConstBytes in, bool add, float* y, std::size_t n) const override {
    check_room(*this, in.size(), max_bytes(n), n);
    const auto decode = add ? kernels().int8.decode_add : kernels().int8.decode;
    return {max_bytes(n), decode(in.data(), n, block(), y)};
  }
};

}  // namespace

std::shared_ptr<const Codec> make_int8(Parameters& parameters) {
  const std::size_t block = block_of(parameters, 65536);
  const auto [stochastic, seed] = rounding_of(parameters);
  return std::make_shared<Int8>(parameters.canonical(), block, stochastic, seed);
}

}  // namespace gradwire::codec
