#include "gradwire/codec/lowrank.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "gradwire/base/error.h"
#include "gradwire/codec/simd/simd.h"
#include "gradwire/codec/spec.h"
#include "gradwire/codec/splitmix64.h"

namespace gradwire::codec {
namespace {

constexpr std::size_t kDefaultRank = 4;
constexpr std::size_t kLanesOfSums = 16;
constexpr double kVanished = 0x1p-60;  // of its squared length; with less, a column becomes 0

[[noreturn]] void refuse(const Codec& codec) {
  throw InvalidArgument("codec " + codec.name() +
                        " sums whole matrices over all ranks: it has no payload of its own; use "
                        "all_reduce");
}

void draw(std::size_t k, std::span<float> column) {
  for (std::size_t j = 0; j < column.size(); ++j) {
    const std::uint64_t word = splitmix64((k << 32 | j) * kSplitMix64Step);
    const auto bits = static_cast<std::int32_t>(word >> 41);  // 23 bits
    column[j] = static_cast<float>(2 * bits + 1 - (1 << 23)) * 0x1p-23F;
  }
}

// Returns the largest magnitude. Compares magnitudes as integers, which have the same order and let
// the compiler make a fast maximum.
float largest(std::span<const float> values) {
  std::int32_t most = 0;
  for (float each : values) most = std::max(most, std::bit_cast<std::int32_t>(each) & 0x7FFFFFFF);
  return std::bit_cast<float>(most);
}

// Scales the column so that its largest element lies in [kHeadroom / 2, kHeadroom). Works in
// binary64, which holds every power of two that this can need.
void scale_to_headroom(std::span<float> column) {
  int exponent = 0;
  std::frexp(largest(column), &exponent);
  const double factor = std::ldexp(static_cast<double>(kHeadroom), -exponent);
  for (float& each : column) each = static_cast<float>(each * factor);
}

double dot(const double* a, const double* b, std::size_t n) {
  std::array<double, kLanesOfSums> lanes{};
  std::size_t i = 0;
  for (; i + kLanesOfSums <= n; i += kLanesOfSums)
    for (std::size_t l = 0; l < kLanesOfSums; ++l) lanes[l] += a[i + l] * b[i + l];
  for (std::size_t l = 0; i < n; ++i, ++l) lanes[l] += a[i] * b[i];
  for (std::size_t width = kLanesOfSums / 2; width > 0; width /= 2)
    for (std::size_t l = 0; l < width; ++l) lanes[l] += lanes[l + width];
  return lanes[0];
}

void subtract(double* a, double times, const double* b, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) a[i] -= times * b[i];
}

}  // namespace

LowRank::LowRank(std::size_t rank)
    : Codec({.name = rank == kDefaultRank ? "lowrank" : "lowrank:rank=" + std::to_string(rank),
             .definition = {.kind = Definition::Kind::kLowRank, .rank = rank},
             .combine = Combine::kCompound,
             .biased = true}) {
  if (rank >= 1 && rank <= kMostRank) return;
  throw InvalidArgument("codec lowrank: rank=" + std::to_string(rank) + " is not 1 to " +
                        std::to_string(kMostRank));
}

std::size_t LowRank::write(const float*, std::size_t, const EncodeContext&, std::byte*) const {
  refuse(*this);
}
Decoded LowRank::read(ConstBytes, bool, float*, std::size_t) const { refuse(*this); }

bool worth_factoring(const Factors& of) noexcept {
  return (of.rows + of.columns) * of.rank < of.rows * of.columns;
}

void start_factor(std::span<const float> last, const Factors& of, std::span<float> q) {
  for (std::size_t k = 0; k < of.rank; ++k) {
    const std::size_t first = k * of.columns;
    const std::span<float> column = q.subspan(first, of.columns);
    const bool warm = last.size() >= first + of.columns;
    if (warm) std::ranges::copy(last.subspan(first, of.columns), column.begin());
    if (!warm || !kernels().finite(column.data(), column.size()) || largest(column) == 0)
      draw(k, column);
    scale_to_headroom(column);
  }
}

float take_headroom(std::span<float> q) {
  if (largest(q) > 0x1p64F) return 1 / kHeadroom;
  for (float& each : q) each *= 1 / kHeadroom;
  return 1;
}

void orthonormalise(const Factors& of, std::span<float> p, std::vector<double>& room) {
  room.assign(p.begin(), p.end());
  const std::size_t n = of.rows;
  for (std::size_t k = 0; k < of.rank; ++k) {
    double* column = room.data() + k * n;
    const double before = dot(column, column, n);
    for (const double* each = room.data(); each != column; each += n)
      subtract(column, dot(each, column, n), each, n);
    const double after = dot(column, column, n);
    const double factor = after > before * kVanished ? 1 / std::sqrt(after) : 0;
    for (std::size_t i = 0; i < n; ++i) column[i] *= factor;
  }
  std::ranges::transform(room, p.begin(), [](double each) { return static_cast<float>(each); });
}

std::shared_ptr<const Codec> make_lowrank(Parameters& parameters) {
  return std::make_shared<LowRank>(parameters.whole("rank", kDefaultRank, 1, kMostRank));
}

}  // namespace gradwire::codec
