// none: float32 as it is. It loses nothing and books nothing.
#include <cstring>

#include "gradwire/codec/simd.h"
#include "gradwire/codec/spec.h"

namespace gradwire::codec {
namespace {

class None final : public Codec {
 public:
  std::string name() const override { return "none"; }
  Combine combine() const noexcept override { return Combine::kPlain; }
  bool biased() const noexcept override { return false; }
  std::size_t unit() const noexcept override { return 1; }
  std::size_t max_bytes(std::size_t n) const noexcept override { return n * sizeof(float); }

  std::size_t encode(const float* x, std::size_t n, Position, float*, Bytes out) const override {
    check_room(*this, out.size(), max_bytes(n), n);
    if (n > 0) std::memcpy(out.data(), x, max_bytes(n));
    return max_bytes(n);
  }

  std::size_t decode(ConstBytes in, float* y, std::size_t n) const override {
    check_room(*this, in.size(), max_bytes(n), n);
    if (n > 0) std::memcpy(y, in.data(), max_bytes(n));
    return max_bytes(n);
  }

  std::size_t decode_add(ConstBytes in, float* y, std::size_t n) const override {
    check_room(*this, in.size(), max_bytes(n), n);
    const auto& sum = kernels().reduce[static_cast<std::size_t>(DType::kFloat32)];
    sum[static_cast<std::size_t>(ReduceOp::kSum)](y, in.data(), n);
    return max_bytes(n);
  }
};

}  // namespace

std::shared_ptr<const Codec> make_none(Parameters&) { return std::make_shared<None>(); }

}  // namespace gradwire::codec
