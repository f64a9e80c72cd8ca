#include "gradwire/codec/feedback/residuals.h"

#include <algorithm>
#include <utility>

#include "gradwire/codec/simd/simd.h"

namespace gradwire::codec {
namespace {

constexpr std::uint64_t kOfCalls = 0x72657369, kOfChanges = 0x6475616C;  // seeds
// Elements that are widened at a time, unless a codec's block is longer: 64 KiB, for the L2 cache.
constexpr std::size_t kWide = 16384;

void widen(const std::uint16_t* narrow, float* values, std::size_t n) noexcept {
  kernels().bf16.decode(reinterpret_cast<const std::byte*>(narrow), 1, values, n);
}

void round(const float* values, const RandomPosition& position, std::uint16_t* narrow,
           std::size_t n) noexcept {
  kernels().bf16_at_random(values, position, reinterpret_cast<std::byte*>(narrow), n);
}

}  // namespace

void Residual::resize(std::size_t n) {
  type_ == ResidualType::kFloat32 ? wide_.resize(n) : narrow_.resize(n);
}

void Residual::swap(Residual& other) noexcept {
  std::swap(type_, other.type_);
  wide_.swap(other.wide_);
  narrow_.swap(other.narrow_);
}

std::vector<float> Residual::values() const& {
  if (type_ == ResidualType::kFloat32) return wide_;
  std::vector<float> found(narrow_.size());
  read(0, found);
  return found;
}

std::vector<float> Residual::values() && {
  if (type_ == ResidualType::kFloat32) return std::move(wide_);
  return std::as_const(*this).values();
}

void Residual::assign(std::vector<float> values, std::uint64_t draw) {
  if (type_ == ResidualType::kFloat32) {
    wide_ = std::move(values);
    return;
  }
  narrow_.resize(values.size());
  write(0, values, draw);
}

void Residual::read(std::size_t first, std::span<float> values) const noexcept {
  if (type_ == ResidualType::kFloat32)
    std::copy_n(wide_.data() + first, values.size(), values.begin());
  else
    widen(narrow_.data() + first, values.data(), values.size());
}

void Residual::write(std::size_t first, std::span<const float> values,
                     std::uint64_t draw) noexcept {
  if (type_ == ResidualType::kFloat32)
    std::ranges::copy(values, wide_.data() + first);
  else
    round(values.data(), {kOfChanges, draw, first}, narrow_.data() + first, values.size());
}

void Residual::read_by(EncodeContext& context) const noexcept {
  if (!wide_.empty()) context.residual = wide_.data();
  if (!narrow_.empty()) context.narrow_residual = narrow_.data();
}

void Residual::write_by(EncodeContext& context) noexcept {
  if (type_ == ResidualType::kFloat32)
    context.error = wide_.data();
  else
    context.narrow_error = narrow_.data();
}

std::size_t encode(const Codec& codec, const float* x, std::size_t n, const EncodeContext& context,
                   Bytes out) {
  if (context.narrow_error == nullptr) return codec.encode(x, n, context, out);
  thread_local std::vector<float> wide;
  const std::size_t block = codec.block();
  const std::size_t most = std::max(block, kWide / block * block);
  if (wide.size() < std::min(n, most)) wide.resize(std::min(n, most));
  std::size_t size = 0;
  for (std::size_t i = 0; i < n; i += most) {
    const std::size_t count = std::min(most, n - i);
    const EncodeContext narrow = context.from(i);
    EncodeContext here = narrow;
    here.error = wide.data();
    if (here.narrow_residual != nullptr) {
      widen(here.narrow_residual, wide.data(), count);
      here.residual = wide.data();
    }
    size += codec.encode(x + i, count, here, out.subspan(size));
    keep(narrow, wide.data(), count);
  }
  return size;
}

void deliver(const EncodeContext& context, float* x, std::size_t n) {
  add_residual(context, x, n);
  if (context.error != nullptr) std::fill_n(context.error, n, 0.0F);
  if (context.narrow_error != nullptr) std::fill_n(context.narrow_error, n, std::uint16_t{0});
}

void add_residual(const EncodeContext& context, float* x, std::size_t n) {
  const Kernels& own = kernels();
  if (context.residual != nullptr) {
    const auto& sums = own.reduce[static_cast<std::size_t>(DType::kFloat32)];
    sums[static_cast<std::size_t>(ReduceOp::kSum)](x, context.residual, n);
  } else if (context.narrow_residual != nullptr) {
    own.bf16.decode_add(reinterpret_cast<const std::byte*>(context.narrow_residual), 1, x, n);
  }
}

void keep(const EncodeContext& context, const float* error, std::size_t n) {
  if (context.error != nullptr)
    std::copy_n(error, n, context.error);
  else
    round(error, {kOfCalls, context.call, context.element}, context.narrow_error, n);
}

}  // namespace gradwire::codec
