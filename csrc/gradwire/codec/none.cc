// none: float32 as it is. It loses nothing and delivers the whole residual.
#include <cstring>

#include "gradwire/codec/simd/simd.h"
#include "gradwire/codec/spec.h"

namespace gradwire::codec {
namespace {

class None final : public Codec {
 public:
  None()
      : Codec({.name = "none",
               .definition = {.kind = Definition::Kind::kNone},
               .combine = Combine::kPlain}) {}

  std::size_t max_bytes(std::size_t n) const noexcept override { return n * sizeof(float); }

 private:
  std::size_t write(const float* x, std::size_t n, const EncodeContext& context,
                    std::byte* out) const override {
    if (n == 0) return 0;
    std::memcpy(out, x, max_bytes(n));
    if (context.residual != nullptr) sum()(out, context.residual, n);
    if (context.error != nullptr) std::memset(context.error, 0, max_bytes(n));
    return max_bytes(n);
  }
  Decoded read(ConstBytes in, bool add, float* y, std::size_t n) const override {
    check_room(*this, in.size(), max_bytes(n), n);
    if (add)
      sum()(y, in.data(), n);
    else if (n > 0)
      std::memcpy(y, in.data(), max_bytes(n));
    return {max_bytes(n), kernels().finite(y, n)};
  }
  static ReduceKernel sum() {
    return kernels().reduce[static_cast<std::size_t>(DType::kFloat32)]
                           [static_cast<std::size_t>(ReduceOp::kSum)];
  }
};

}  // namespace

std::shared_ptr<const Codec> make_none(Parameters&) { return std::make_shared<None>(); }

}  // namespace gradwire::codec
