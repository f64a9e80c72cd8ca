// int4: per unit of 1024 elements (the last may be shorter) a bfloat16 scale for each of its
// blocks, in order, then four bits an element, so that any whole units are a payload of their
// own: 4.5 bits an element in blocks of 32. v := x + residual, in binary32, each operation rounded
// once:
//   A := max |v| of the block.
//   A is NaN or Inf: scale := NaN, codes 0, errors 0; all of the block decodes to NaN.
//   A < 2^-100: scale := inverse := 0, so that all of v stays in the error.
//   Else scale := A, rounded to bfloat16, ties to even, and limited to the largest finite one; then
//   it takes the sign of the v whose magnitude is A, minus where both signs have it.
//   inverse := 1 / scale; t := v · inverse; q := max(−7, round(t · (12 − 4 · |t|))), ties to even:
//   the v whose magnitude is A becomes 8, which |q| never exceeds.
//   y := level(q) · scale, level(q) := ±(3 − √(9 − |q|)) / 2; error := v − y.
// The levels are those to which t · (12 − 4 · |t|) gives integers. They lie three times as close to
// each other near 0 as near 1. So optimizers that divide each element by its own size (Adam) see
// fewer zeros, and the squared error of gradients is less than that of equal steps, too.
//
// A code is the last four bits of q, in which 8 takes the place of −8. Elements i and i + 16 of
// each 32 share byte i, the first in its lower half; a last group of n < 32 has min(n, 16) bytes,
// whose other halves are 0. A block whose scale is not finite decodes to NaN.
//
// rounding=stochastic: scale := A, rounded up to bfloat16 and limited in the same way, without a
// sign; inverse := 7 / scale; t := v · inverse limited to ±7; q := floor(t) + (u < t − floor(t)), u
// as in codec/int8.cc, of the elements' numbers in their unit; level(q) = q / 7. So the mean of y
// is v to 2^-22 of the scale, but for |v| above that limit. The code of 8 has the level of 7.
#include "gradwire/codec/simd/simd.h"
#include "gradwire/codec/spec.h"

namespace gradwire::codec {
namespace {

class Int4 final : public Codec {
 public:
  Int4(const std::string& name, std::size_t block, bool stochastic, std::uint64_t seed)
      : Codec({.name = name,
               .definition = {.kind = Definition::Kind::kInt4,
                              .block = block,
                              .stochastic = stochastic,
                              .seed = seed},
               .block = Int4Kernels::kUnit,
               .seconds_per_byte = {8e-11, 5e-11}}) {}

  std::size_t max_bytes(std::size_t n) const noexcept override {
    return Int4Kernels::bytes(n, definition().block);
  }

 private:
  std::size_t write(const float* x, std::size_t n, const EncodeContext& context,
                    std::byte* out) const override {
    const RandomPosition position{definition().seed, context.call, context.element};
    kernels().int4.encode(x, context.residual, n, definition().block,
                          definition().stochastic ? &position : nullptr, out, context.error);
    return max_bytes(n);
  }
  Decoded read(ConstBytes in, bool add, float* y, std::size_t n) const override {
    check_room(*this, in.size(), max_bytes(n), n);
    const Int4Kernels::Levels& levels =
        definition().stochastic ? Int4Kernels::kEqual : Int4Kernels::kNearest;
    const auto decode = add ? kernels().int4.decode_add : kernels().int4.decode;
    return {max_bytes(n), decode(in.data(), n, definition().block, levels, y)};
  }
};

}  // namespace

std::shared_ptr<const Codec> make_int4(Parameters& parameters) {
  const std::size_t block = std::stoul(parameters.choice("block", {"32", "64", "128"}));
  const auto [stochastic, seed] = rounding_of(parameters);
  return std::make_shared<Int4>(parameters.canonical(), block, stochastic, seed);
}

}  // namespace gradwire::codec
