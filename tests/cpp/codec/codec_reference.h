// What the kernels should give, computed slowly and from the formats' definitions, in float64.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "gradwire/base/types.h"

namespace gradwire::codec {

// An IEEE 754 binary format by its field widths.
struct Format {
  int exponent_bits;
  int mantissa_bits;

  int bytes() const { return (1 + exponent_bits + mantissa_bits) / 8; }
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  std::uint64_t sign() const { return std::uint64_t{1} << (exponent_bits + mantissa_bits); }
  std::uint64_t infinity() const { return field((1 << exponent_bits) - 1); }
  std::uint64_t quiet_nan() const { return infinity() | (std::uint64_t{1} << (mantissa_bits - 1)); }
  std::uint64_t field(int exponent) const {
    return static_cast<std::uint64_t>(exponent) << mantissa_bits;
  }
  bool is_nan(std::uint64_t bits) const { return (bits & (sign() - 1)) > infinity(); }

  double decode(std::uint64_t bits) const {
    const std::uint64_t magnitude = bits & (sign() - 1);
    const double sign_of = (bits & sign()) != 0 ? -1.0 : 1.0;
    if (magnitude > infinity()) return std::numeric_limits<double>::quiet_NaN();
    if (magnitude == infinity()) return sign_of * std::numeric_limits<double>::infinity();
    const int exponent = static_cast<int>(magnitude >> mantissa_bits);
    const std::uint64_t fraction = magnitude & (field(1) - 1);
    const std::uint64_t digits = exponent == 0 ? fraction : fraction | field(1);
    const int scale = std::max(exponent, 1) - bias() - mantissa_bits;
    return sign_of * std::ldexp(static_cast<double>(digits), scale);
  }

  // To nearest even, overflow to Inf; every NaN is the quiet one.
  std::uint64_t encode(double value) const {
    if (std::isnan(value)) return quiet_nan();
    const std::uint64_t sign_of = std::signbit(value) ? sign() : 0;
    if (std::isinf(value)) return sign_of | infinity();
    const int least = 1 - bias();
    const int exponent = value == 0 ? least : std::max(std::ilogb(value), least);
    const double digits = std::nearbyint(std::ldexp(std::fabs(value), mantissa_bits - exponent));
    // A carry out of the digits lands in the exponent, where it belongs.
    const std::uint64_t bits = (static_cast<std::uint64_t>(exponent - least) << mantissa_bits) +
                               static_cast<std::uint64_t>(digits);
    return sign_of | std::min(bits, infinity());
  }
};

inline constexpr Format kFloat32Format{8, 23};
inline constexpr Format kFloat64Format{11, 52};
inline constexpr Format kFp16Format{5, 10};
inline constexpr Format kBf16Format{8, 7};

// Families of bit patterns in which the kernels could go wrong.
enum class Data { kNormal, kHuge, kDenormal, kSpecial, kRandomBits };
inline constexpr Data kAllData[] = {Data::kNormal, Data::kHuge, Data::kDenormal, Data::kSpecial,
                                    Data::kRandomBits};

inline std::uint64_t special(const Format& format, std::uint64_t pick) {
  const std::uint64_t inf = format.infinity();
  const std::uint64_t magnitudes[] = {0,
                                      1,
                                      format.field(1) - 1,
                                      format.field(1),
                                      inf - 1,
                                      inf,
                                      inf + 1,
                                      format.quiet_nan(),
                                      inf - 2,
                                      format.quiet_nan() | 3,
                                      format.field(format.bias())};
  return magnitudes[(pick >> 1) % std::size(magnitudes)] | ((pick & 1) != 0 ? format.sign() : 0);
}

inline std::uint64_t draw(const Format& format, Data data, std::mt19937_64& random) {
  const std::uint64_t bits = random() & (format.sign() | (format.sign() - 1));
  const std::uint64_t digits = bits & (format.sign() | (format.field(1) - 1));
  const int spread = static_cast<int>(random() % 8);
  switch (data) {
    case Data::kNormal:
      return digits | format.field(format.bias() + spread - 4);
    case Data::kHuge:
      return digits | format.field(2 * format.bias() - spread % 2);
    case Data::kDenormal:
      return digits;
    case Data::kSpecial:
      return special(format, random());
    case Data::kRandomBits:
      return bits;
  }
  return bits;
}

inline float draw_float(Data data, std::mt19937_64& random) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(draw(kFloat32Format, data, random)));
}

// The format of each part of a complex number; null for integers.
inline const Format* format_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return &kFloat32Format;
    case DType::kFloat64:
      return &kFloat64Format;
    case DType::kFloat16:
      return &kFp16Format;
    case DType::kBFloat16:
      return &kBf16Format;
    case DType::kComplex64:
      return &kFloat32Format;
    case DType::kComplex128:
      return &kFloat64Format;
    default:
      return nullptr;
  }
}

// An array of n elements; integers are any.
inline std::vector<std::byte> draw_elements(DType dtype, std::size_t n, Data data,
                                            std::mt19937_64& random) {
  const std::size_t parts = is_complex(dtype) ? 2 : 1, size = size_of(dtype) / parts;
  std::vector<std::byte> bytes(n * size_of(dtype));
  const Format* format = format_of(dtype);
  for (std::size_t i = 0; i < n * parts; ++i) {
    const std::uint64_t bits = format != nullptr ? draw(*format, data, random) : random();
    std::memcpy(bytes.data() + i * size, &bits, size);
  }
  return bytes;
}

}  // namespace gradwire::codec
