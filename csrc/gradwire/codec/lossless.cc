// lossless: exponents in few bits, signs and mantissas as they are. Of each float16, bfloat16 or
// float32, the eight bits behind the sign are the exponent (of float16: and the top of the
// mantissa), and the low bytes are the sign, followed by the others: those of a float32 that holds
// a bfloat16 are 0 but one. A block has 128 elements, the last of a run fewer:
//   1 byte     width (0 to 8), and from bit 4 on a bit for each low byte, set where it is 0 in all
//              elements and left out
//   width 8:   n exponents
//   others:    the largest exponent
//              `width` planes of ceil(n / 8) bytes: bit k of how far each exponent is below it,
//              first element lowest; all bits set: so far or farther
//              the exponent of each of these, in order; none where the width is 0
//   n bytes for each low byte, the lowest first
// The width is that of the fewest bytes, the smallest of those; 8 if none saves any. So a block has
// one byte more than its elements at most.
//
// Packed elements, a message's: bytes of an element (1 byte), bytes of all (4), blocks.
#include "gradwire/codec/lossless.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "gradwire/base/error.h"
#include "gradwire/codec/simd/simd.h"
#include "gradwire/codec/spec.h"

namespace gradwire::codec {
namespace {

constexpr std::size_t kBlock = LosslessKernels::kBlock;

struct Prefix {
  static constexpr std::size_t kBytes = 5;

  std::uint8_t word = 0;
  std::uint32_t bytes = 0;

  void write(std::byte* out) const {
    std::memcpy(out, &word, sizeof word);
    std::memcpy(out + 1, &bytes, sizeof bytes);
  }
};

const LosslessKernels::OfWords& kernels_of(std::size_t word) {
  return word == 2 ? kernels().lossless.two : kernels().lossless.four;
}

// Returns zeros where the bytes are no packed elements.
Prefix prefix_of(ConstBytes packed) noexcept {
  Prefix prefix;
  if (packed.size() < Prefix::kBytes) return {};
  std::memcpy(&prefix.word, packed.data(), sizeof prefix.word);
  std::memcpy(&prefix.bytes, packed.data() + 1, sizeof prefix.bytes);
  const bool is_known = prefix.word == 2 || prefix.word == 4;
  return is_known && prefix.bytes % prefix.word == 0 ? prefix : Prefix{};
}

// A run of elements at a time, so that what is added to or read stays in the first-level cache.
constexpr std::size_t kRun = 8 * kBlock;
using Run = std::array<float, kRun>;

class Lossless final : public Codec {
 public:
  Lossless()
      : Codec({.name = "lossless",
               .definition = {.kind = Definition::Kind::kLossless},
               .combine = Combine::kPlain,
               .block = kBlock,
               .fixed_size = false,
               .seconds_per_byte = {4e-10, 3e-10}}) {}

  std::size_t max_bytes(std::size_t n) const noexcept override {
    return n * sizeof(float) + (n + kBlock - 1) / kBlock;
  }
  std::size_t usual_bytes(std::size_t n) const noexcept override { return n * 7 / 2; }

 private:
  std::size_t write(const float* x, std::size_t n, const EncodeContext& context,
                    std::byte* out) const override;
  Decoded read(ConstBytes in, bool add, float* y, std::size_t n) const override;

  static ReduceKernel sum() {
    return kernels().reduce[static_cast<std::size_t>(DType::kFloat32)]
                           [static_cast<std::size_t>(ReduceOp::kSum)];
  }
};

std::size_t Lossless::write(const float* x, std::size_t n, const EncodeContext& context,
                            std::byte* out) const {
  std::size_t written = 0;
  Run v;
  for (std::size_t i = 0; i < n; i += kRun) {
    const std::size_t count = std::min(kRun, n - i);
    std::memcpy(v.data(), x + i, count * sizeof(float));
    if (context.residual != nullptr) sum()(v.data(), context.residual + i, count);
    written += kernels_of(sizeof(float))
                   .pack(reinterpret_cast<const std::byte*>(v.data()), count, out + written,
                         max_bytes(count));
  }
  if (context.error != nullptr) std::fill_n(context.error, n, 0.0F);
  return written;
}

Decoded Lossless::read(ConstBytes in, bool add, float* y, std::size_t n) const {
  Decoded decoded;
  Run v;
  for (std::size_t i = 0; i < n; i += kRun) {
    const std::size_t count = std::min(kRun, n - i);
    const ConstBytes rest = in.subspan(decoded.bytes);
    const std::size_t bytes =
        kernels_of(sizeof(float))
            .unpack(rest.data(), rest.size(), reinterpret_cast<std::byte*>(v.data()), count);
    if (bytes == 0)
      throw InvalidArgument("codec lossless: the payload is not that of " + std::to_string(n) +
                            " elements");
    decoded.bytes += bytes;
    if (add)
      sum()(y + i, v.data(), count);
    else
      std::memcpy(y + i, v.data(), count * sizeof(float));
  }
  decoded.finite = kernels().finite(y, n);
  return decoded;
}

}  // namespace

bool packs(DType dtype) noexcept {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

std::size_t pack(DType dtype, ConstBytes plain, Bytes out) noexcept {
  const std::size_t word = size_of(dtype);
  if (plain.size() <= Prefix::kBytes || plain.size() % word != 0) return 0;
  Prefix{static_cast<std::uint8_t>(word), static_cast<std::uint32_t>(plain.size())}.write(
      out.data());
  const std::size_t bytes =
      kernels_of(word).pack(plain.data(), plain.size() / word, out.data() + Prefix::kBytes,
                            plain.size() - Prefix::kBytes);
  const std::size_t packed = Prefix::kBytes + bytes;
  return bytes > 0 && packed < plain.size() ? packed : 0;
}

std::size_t unpacked_bytes(ConstBytes packed) noexcept { return prefix_of(packed).bytes; }

void unpack(ConstBytes packed, Bytes plain) {
  const Prefix prefix = prefix_of(packed);
  std::size_t consumed = 0;
  if (prefix.bytes == plain.size() && prefix.bytes > 0) {
    const ConstBytes blocks = packed.subspan(Prefix::kBytes);
    consumed = Prefix::kBytes +
               kernels_of(prefix.word)
                   .unpack(blocks.data(), blocks.size(), plain.data(), plain.size() / prefix.word);
  }
  if (consumed <= Prefix::kBytes || consumed != packed.size())
    throw InvalidArgument(std::to_string(packed.size()) + " bytes are no packed elements of " +
                          std::to_string(plain.size()) + " bytes");
}

std::shared_ptr<const Codec> make_lossless(Parameters&) { return std::make_shared<Lossless>(); }

}  // namespace gradwire::codec
