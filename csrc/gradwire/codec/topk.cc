// topk: sends the largest elements of each block, exactly (the selection of Lin 2018, sec. 3; the
// caller does what helps it converge besides feedback, such as momentum correction). For each block
// of v := x + residual, rounded once:
//   k := density · elements of the block, rounded, at least 1; the k largest |v| are sent, of equal
//   ones those with the lower index. y := v there, 0 elsewhere; error := v − y.
//   values=fp16, bf16: y := v in that format, to nearest even, limited to its largest.
//   values=2bit: y := v in two bits (codec/two_bits.h), as SparseLoCo sends it (Sarfi 2025). These
//   have no 0, so elements that are 0 are not sent.
//   A block with NaN or Inf decodes to NaN; its errors are v, 0 where v is not finite.
// A block's record in the payload: its positions (codec/sparse.h), then their values.
//
// CodecState::filter passes the last block's threshold on to the next block. It changes no result.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "gradwire/codec/simd/simd.h"
#include "gradwire/codec/sparse.h"
#include "gradwire/codec/spec.h"
#include "gradwire/codec/two_bits.h"

namespace gradwire::codec {
namespace {

using Values = Definition::Values;

class TopK final : public SparseCodec {
 public:
  TopK(const std::string& name, double density, Values values)
      : SparseCodec(name, {.kind = Definition::Kind::kTopK, .density = density, .values = values},
                    {1e-10, 2e-11}) {}

 private:
  // Returns the kernels of the 16-bit format in which values travel; null for other formats.
  const CastKernels* cast() const {
    if (definition().values == Values::kFp16) return &kernels().fp16;
    return definition().values == Values::kBf16 ? &kernels().bf16 : nullptr;
  }
  std::size_t bytes_of_values(std::size_t count) const {
    if (definition().values == Values::kTwoBits) return TwoBits::bytes(count);
    return count * (cast() == nullptr ? sizeof(float) : sizeof(std::uint16_t));
  }
  std::size_t most_bytes(std::size_t n) const noexcept override {
    return most_position_bytes(n) + bytes_of_values(share_of(definition().density, n));
  }
  std::size_t write(const float* x, std::size_t n, const EncodeContext& context,
                    std::byte* out) const override;
  std::size_t encode_block(SparseSource block, float* error, CodecState* state,
                           std::byte* out) const override;
  std::size_t write_values(SparseSource v, float* error, SparseScratch& scratch,
                           std::byte* out) const;
  bool read_values(PayloadReader& reader, const Positions& positions, bool add,
                   float* y) const override;
};

// Writes the values, and books in `error` what they lose, which is nothing in float32.
std::size_t TopK::write_values(SparseSource v, float* error, SparseScratch& scratch,
                               std::byte* out) const {
  const auto index = scratch.positions.all();
  for (std::size_t k = 0; k < index.size(); ++k) scratch.values[k] = v[index[k]];
  const std::span<const float> values(scratch.values.data(), index.size());
  if (definition().values == Values::kFloat32) {
    std::memcpy(out, values.data(), values.size_bytes());
    std::fill_n(scratch.errors.begin(), values.size(), 0.0F);
  } else if (definition().values == Values::kTwoBits) {
    write_two_bits(values, out, scratch.errors.data());
  } else {
    cast()->encode(values.data(), nullptr, 1, out, scratch.errors.data(), values.size());
  }
  for (std::size_t k = 0; error != nullptr && k < index.size(); ++k)
    error[index[k]] = scratch.errors[k];
  return bytes_of_values(index.size());
}

// The filter passes from block to block, whether or not the caller keeps it for the next call.
std::size_t TopK::write(const float* x, std::size_t n, const EncodeContext& context,
                        std::byte* out) const {
  CodecState own;
  EncodeContext here = context;
  if (here.codec_state == nullptr) here.codec_state = &own;
  return SparseCodec::write(x, n, here, out);
}

std::size_t TopK::encode_block(SparseSource block, float* error, CodecState* state,
                               std::byte* out) const {
  SparseScratch& scratch = SparseScratch::mine();
  float& filter = state->filter;
  filter = std::isfinite(filter) ? std::max(0.0F, filter) : 0;
  const std::uint32_t smallest =
      select_largest(block, share_of(definition().density, block.n), error, filter, scratch);
  if (smallest >= kInfinityBits) {
    clear_not_finite(error, block.n);
    return write_not_finite(out);
  }
  if (error != nullptr) block = {error, nullptr, block.n};  // holds v; residual may be overwritten
  if (smallest == 0 && definition().values == Values::kTwoBits)
    scratch.positions.drop([&](std::uint16_t i) { return block[i] == 0; });
  const std::size_t size = write_positions(scratch.positions.all(), block.n, out);
  return size + write_values(block, error, scratch, out + size);
}

bool TopK::read_values(PayloadReader& reader, const Positions& positions, bool add,
                       float* y) const {
  const std::span<float> values(SparseScratch::mine().values.data(), positions.count);
  const ConstBytes in = reader.take(bytes_of_values(values.size()));
  bool finite = true;
  if (definition().values == Values::kTwoBits) {
    finite = read_two_bits(in.data(), values);
  } else if (cast() != nullptr) {
    finite = cast()->decode(in.data(), 1, values.data(), values.size());
  } else {
    std::memcpy(values.data(), in.data(), in.size());
    finite = kernels().finite(values.data(), values.size());
  }
  for (std::size_t k = 0; k < values.size(); ++k) {
    float& at = y[positions.index[k]];
    at = add ? at + values[k] : values[k];
  }
  return finite;
}

}  // namespace

std::shared_ptr<const Codec> make_topk(Parameters& parameters) {
  const double density = parameters.real("density", 0.001, 1e-9, 1);
  const std::string values = parameters.choice("values", {"fp32", "fp16", "bf16", "2bit"});
  return std::make_shared<TopK>(parameters.canonical(), density,
                                values == "fp16"   ? Values::kFp16
                                : values == "bf16" ? Values::kBf16
                                : values == "2bit" ? Values::kTwoBits
                                                   : Values::kFloat32);
}

}  // namespace gradwire::codec
