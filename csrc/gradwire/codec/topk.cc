// topk: sends the largest elements of each unit, exactly (the selection of Lin 2018, sec. 3; the
// caller does what helps it converge besides feedback, such as momentum correction). For each unit
// of v := x + residual, rounded once:
//   k := density · elements of the unit, rounded, at least 1; the k largest |v| are sent, of equal
//   ones those with the lower index. y := v there, 0 elsewhere; error := v − y.
//   values=fp16, bf16: y := v in that format, to nearest even, limited to its largest.
//   A unit with NaN or Inf decodes to NaN; its errors are v, 0 where v is not finite.
// A unit's part of the payload: its positions (codec/sparse.h), then their values.
//
// CodecState::filter passes the last unit's threshold on to the next unit. It changes no result.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "gradwire/codec/simd/simd.h"
#include "gradwire/codec/sparse.h"
#include "gradwire/codec/spec.h"

namespace gradwire::codec {
namespace {

class TopK final : public Codec {
 public:
  // `cast` says as what values travel; null for float32.
  TopK(std::string name, double density, CastKernels Kernels::* cast)
      : name_(std::move(name)), density_(density), cast_(cast) {}

  std::string name() const override { return name_; }
  Definition definition() const noexcept override {
    using Kind = Definition::Kind;
    Definition made;
    made.kind = Kind::kTopK;
    made.density = density_;
    made.values = cast_ == nullptr          ? Kind::kNone
                  : cast_ == &Kernels::fp16 ? Kind::kFp16
                                            : Kind::kBf16;
    return made;
  }
  Combine combine() const noexcept override { return Combine::kReencode; }
  SecondsPerByte seconds_per_byte() const noexcept override { return {1e-10, 2e-11}; }
  bool biased() const noexcept override { return true; }
  bool gathers(int ranks) const noexcept override { return worth_gathering(ranks, density_); }
  std::size_t unit() const noexcept override { return kSparseUnit; }
  bool fixed_size() const noexcept override { return false; }
  std::size_t max_bytes(std::size_t n) const noexcept override {
    const std::size_t rest = n % kSparseUnit;
    return n / kSparseUnit * most_bytes(kSparseUnit) + (rest > 0 ? most_bytes(rest) : 0);
  }

  std::size_t encode(const float* x, std::size_t n, const EncodeContext& context,
                     Bytes out) const override;

  Decoded decode(ConstBytes in, float* y, std::size_t n) const override {
    if (n > 0) std::memset(y, 0, n * sizeof(float));
    return scatter(in, y, n, [](float& at, float value) { at = value; });
  }
  Decoded decode_add(ConstBytes in, float* y, std::size_t n) const override {
    return scatter(in, y, n, [](float& at, float value) { at += value; });
  }

 private:
  std::size_t value_bytes() const { return cast_ == nullptr ? sizeof(float) : 2; }
  std::size_t most_bytes(std::size_t n) const {
    return most_position_bytes(n) + share_of(density_, n) * value_bytes();
  }

  std::size_t encode_unit(UnitSource unit, float* error, float& filter, std::byte* out) const;
  std::size_t write_values(UnitSource v, float* error, SparseScratch& scratch,
                           std::byte* out) const;
  bool read_values(ConstBytes in, std::span<float> values) const;
  template <typename Put>
  Decoded scatter(ConstBytes in, float* y, std::size_t n, Put put) const;

  std::string name_;
  double density_;
  CastKernels Kernels::* cast_;
};

// Writes the values, and books in `error` what they lose, which is nothing in float32.
std::size_t TopK::write_values(UnitSource v, float* error, SparseScratch& scratch,
                               std::byte* out) const {
  const auto index = scratch.positions.all();
  for (std::size_t k = 0; k < index.size(); ++k) scratch.values[k] = v[index[k]];
  if (cast_ == nullptr) {
    std::memcpy(out, scratch.values.data(), index.size() * sizeof(float));
    for (std::size_t k = 0; error != nullptr && k < index.size(); ++k) error[index[k]] = 0;
  } else {
    (kernels().*cast_)
        .encode(scratch.values.data(), nullptr, 1, out, scratch.errors.data(), index.size());
    for (std::size_t k = 0; error != nullptr && k < index.size(); ++k)
      error[index[k]] = scratch.errors[k];
  }
  return index.size() * value_bytes();
}

std::size_t TopK::encode_unit(UnitSource unit, float* error, float& filter, std::byte* out) const {
  SparseScratch& scratch = SparseScratch::mine();
  const std::size_t k = share_of(density_, unit.n);
  if (select_largest(unit, k, error, filter, scratch) >= kInfinityBits) {
    for (std::size_t i = 0; error != nullptr && i < unit.n; ++i)
      if (!std::isfinite(error[i])) error[i] = 0;
    return write_not_finite(out);
  }
  const std::size_t size = write_positions(scratch.positions.all(), unit.n, out);
  if (error != nullptr) unit = {error, nullptr, unit.n};  // holds v; residual may be overwritten
  return size + write_values(unit, error, scratch, out + size);
}

std::size_t TopK::encode(const float* x, std::size_t n, const EncodeContext& context,
                         Bytes out) const {
  check_room(*this, out.size(), max_bytes(n), n);
  float filter = context.codec_state != nullptr && std::isfinite(context.codec_state->filter)
                     ? std::max(0.0F, context.codec_state->filter)
                     : 0;
  std::size_t size = 0;
  for (std::size_t i = 0; i < n; i += kSparseUnit) {
    const UnitSource unit{x + i, context.residual == nullptr ? nullptr : context.residual + i,
                          std::min(kSparseUnit, n - i)};
    float* error = context.error == nullptr ? nullptr : context.error + i;
    size += encode_unit(unit, error, filter, out.data() + size);
  }
  if (context.codec_state != nullptr) context.codec_state->filter = filter;
  return size;
}

// Reads values, and returns whether all are finite.
bool TopK::read_values(ConstBytes in, std::span<float> values) const {
  if (cast_ != nullptr)
    return (kernels().*cast_).decode(in.data(), 1, values.data(), values.size());
  std::memcpy(values.data(), in.data(), in.size());
  return kernels().finite(values.data(), values.size());
}

template <typename Put>
Decoded TopK::scatter(ConstBytes in, float* y, std::size_t n, Put put) const {
  PayloadReader reader(in);
  SparseScratch& scratch = SparseScratch::mine();
  const Positions& positions = scratch.positions;
  bool finite = true;
  for (std::size_t i = 0; i < n; i += kSparseUnit) {
    const std::size_t length = std::min(kSparseUnit, n - i);
    if (reader.positions(length, scratch.positions) == PositionFormat::kNotFinite) {
      std::fill_n(y + i, length, std::numeric_limits<float>::quiet_NaN());
      finite = false;
    }
    const std::span<float> values(scratch.values.data(), positions.count);
    if (!read_values(reader.take(values.size() * value_bytes()), values)) finite = false;
    for (std::size_t k = 0; k < values.size(); ++k) put(y[i + positions.index[k]], values[k]);
  }
  return {in.size() - reader.left(), finite};
}

CastKernels Kernels::* cast_of(const std::string& values) {
  if (values == "fp16") return &Kernels::fp16;
  return values == "bf16" ? &Kernels::bf16 : nullptr;
}

}  // namespace

std::shared_ptr<const Codec> make_topk(Parameters& parameters) {
  const double density = parameters.real("density", 0.001, 1e-9, 1);
  const std::string values = parameters.choice("values", {"fp32", "fp16", "bf16"});
  return std::make_shared<TopK>(parameters.canonical(), density, cast_of(values));
}

}  // namespace gradwire::codec
