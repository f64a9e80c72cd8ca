#include "gradwire/codec/two_bits.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

#include "gradwire/codec/simd/simd.h"

namespace gradwire::codec {
namespace {

using Levels = std::array<float, 2>;  // low, high
constexpr std::size_t kLevelBytes = TwoBits::level_bytes(1);

std::uint32_t bits_of(float v) { return std::bit_cast<std::uint32_t>(v); }

std::uint32_t largest_exponent(std::span<const float> v) {
  std::uint32_t most = 0;
  for (const float each : v) most = std::max(most, TwoBits::exponent(bits_of(each)));
  return most;
}

// A mean of m; 0 of none.
struct Mean {
  std::uint32_t sum = 0, count = 0;

  std::uint32_t value() const { return count == 0 ? 0 : sum / count; }
};

// Puts the levels of a group into two floats that bf16 holds. Returns the mean m of all values.
std::uint32_t find_levels(std::span<const float> v, std::uint32_t top, std::byte* out,
                          Levels& levels) {
  Mean all{0, static_cast<std::uint32_t>(v.size())}, high;
  for (const float each : v) all.sum += TwoBits::in_units(bits_of(each), top);
  const std::uint32_t split = all.value();
  for (const float each : v) {
    const std::uint32_t m = TwoBits::in_units(bits_of(each), top);
    high.sum += m > split ? m : 0;
    high.count += m > split ? 1 : 0;
  }
  const Mean low{all.sum - high.sum, all.count - high.count};
  const float unit = std::bit_cast<float>(TwoBits::unit(top));
  levels = {static_cast<float>(low.value()) * unit, static_cast<float>(high.value()) * unit};
  kernels().bf16.encode(levels.data(), nullptr, 1, out, nullptr, levels.size());
  kernels().bf16.decode(out, 1, levels.data(), levels.size());
  return split;
}

void write_group(std::span<const float> v, std::byte* to_levels, std::byte* to_codes,
                 float* error) {
  Levels levels{};
  std::memset(to_levels, 0, kLevelBytes);
  std::memset(to_codes, 0, (v.size() + 3) / 4);
  const std::uint32_t top = largest_exponent(v);
  const bool tiny = top < TwoBits::kLeastExponent;
  const std::uint32_t split = tiny ? 0 : find_levels(v, top, to_levels, levels);
  for (std::size_t k = 0; k < v.size(); ++k) {
    const std::uint32_t bits = bits_of(v[k]), sign = bits >> 31;
    const std::uint32_t high = !tiny && TwoBits::in_units(bits, top) > split ? 1 : 0;
    to_codes[k / 4] |= static_cast<std::byte>((high << 1 | sign) << (2 * (k % 4)));
    const float level = levels[high];
    error[k] = v[k] - (sign != 0 ? -level : level);
  }
}

}  // namespace

void write_two_bits(std::span<const float> v, std::byte* out, float* error) {
  std::byte* codes = out + kLevelBytes * TwoBits::groups(v.size());
  for (std::size_t first = 0; first < v.size(); first += TwoBits::kGroup) {
    const auto group = v.subspan(first, std::min(TwoBits::kGroup, v.size() - first));
    write_group(group, out + kLevelBytes * (first / TwoBits::kGroup), codes + first / 4,
                error + first);
  }
}

bool read_two_bits(const std::byte* in, std::span<float> y) {
  const std::byte* const codes = in + kLevelBytes * TwoBits::groups(y.size());
  bool finite = true;
  for (std::size_t first = 0; first < y.size(); first += TwoBits::kGroup) {
    Levels levels;
    const std::byte* const at = in + kLevelBytes * (first / TwoBits::kGroup);
    finite = kernels().bf16.decode(at, 1, levels.data(), levels.size()) && finite;
    const std::array<float, 4> values = {levels[0], -levels[0], levels[1], -levels[1]};
    const std::size_t end = std::min(y.size(), first + TwoBits::kGroup);
    for (std::size_t k = first; k < end; ++k)
      y[k] = values[std::to_integer<std::uint32_t>(codes[k / 4]) >> (2 * (k % 4)) & 3U];
  }
  return finite;
}

}  // namespace gradwire::codec
