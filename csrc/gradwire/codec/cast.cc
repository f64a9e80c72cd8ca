// fp16 and bf16: each float32 rounded to 16 bits, to nearest even. Finite values saturate at the
// largest finite one, so that the excess stays in the error; NaN keeps its sign and top payload
// bits. fp16:scale=s multiplies by a power of two before the cast and divides after decoding, both
// exactly: for gradients below 6e-5, where float16 has few digits left.
#include <cmath>

#include "gradwire/base/error.h"
#include "gradwire/codec/simd/simd.h"
#include "gradwire/codec/spec.h"

namespace gradwire::codec {
namespace {

class Cast final : public Codec {
 public:
  Cast(const std::string& name, Definition::Kind kind, float scale)
      : Codec({.name = name,
               .definition = {.kind = kind, .scale = scale},
               .seconds_per_byte = {5e-11, 5e-11}}) {}

  std::size_t max_bytes(std::size_t n) const noexcept override { return 2 * n; }

 private:
  const CastKernels& cast() const {
    return definition().kind == Definition::Kind::kFp16 ? kernels().fp16 : kernels().bf16;
  }
  std::size_t write(const float* x, std::size_t n, const EncodeContext& context,
                    std::byte* out) const override {
    cast().encode(x, context.residual, definition().scale, out, context.error, n);
    return max_bytes(n);
  }
  Decoded read(ConstBytes in, bool add, float* y, std::size_t n) const override {
    check_room(*this, in.size(), max_bytes(n), n);
    const auto decode = add ? cast().decode_add : cast().decode;
    return {max_bytes(n), decode(in.data(), definition().scale, y, n)};
  }
};

// Beyond 2^±100 a decoded value could leave the range of float32.
void check_scale(double scale) {
  int exponent = 0;
  const bool power_of_two = scale > 0 && std::frexp(scale, &exponent) == 0.5;
  if (power_of_two && exponent - 1 >= -100 && exponent - 1 <= 100) return;
  throw InvalidArgument("codec fp16: scale=" + shortest(scale) +
                        " is not a power of two from 2^-100 to 2^100");
}

}  // namespace

std::shared_ptr<const Codec> make_fp16(Parameters& parameters) {
  const double scale = parameters.number("scale", 1);
  check_scale(scale);
  return std::make_shared<Cast>(parameters.canonical(), Definition::Kind::kFp16,
                                static_cast<float>(scale));
}

std::shared_ptr<const Codec> make_bf16(Parameters& parameters) {
  return std::make_shared<Cast>(parameters.canonical(), Definition::Kind::kBf16, 1.0F);
}

}  // namespace gradwire::codec
