// Values of every kind that codecs' kernels could treat wrongly.
#pragma once

#include <cmath>
#include <cstddef>
#include <limits>
#include <random>
#include <vector>

#include "codec_reference.h"

namespace gradwire::cuda {

struct Family {
  const char* name;
  float (*draw)(std::size_t i, std::mt19937_64& random);
};

inline float normal(std::size_t, std::mt19937_64& random) {
  return codec::draw_float(codec::Data::kNormal, random);
}

inline constexpr float kMost = std::numeric_limits<float>::max();
inline constexpr float kLeast = std::numeric_limits<float>::denorm_min();

// Those before the last three are all finite.
inline constexpr Family kFamilies[] = {
    {"normal", normal},
    {"huge", [](std::size_t, auto& random) { return draw_float(codec::Data::kHuge, random); }},
    {"denormal",
     [](std::size_t, auto& random) { return draw_float(codec::Data::kDenormal, random); }},
    {"zero", [](std::size_t, auto&) { return 0.0F; }},
    {"signed zeros", [](std::size_t i, auto&) { return i % 3 == 0 ? -0.0F : 0.0F; }},
    {"constant", [](std::size_t, auto&) { return -0.3F; }},
    {"largest of both signs",
     [](std::size_t, auto& random) { return random() % 2 ? kMost : -kMost; }},
    {"least", [](std::size_t i, auto&) { return i % 2 == 0 ? kLeast : -kLeast; }},
    {"from least to largest",
     [](std::size_t, auto& random) {
       const float value = draw_float(codec::Data::kRandomBits, random);
       return std::isfinite(value) ? value : 0x1p-100F;
     }},
    {"one in 20 is zero",
     [](std::size_t i, auto& random) { return random() % 20 ? normal(i, random) : 0.0F; }},
    {"one in 10 is zero",
     [](std::size_t i, auto& random) { return random() % 10 ? normal(i, random) : -0.0F; }},
    {"one in 3 is zero",
     [](std::size_t i, auto& random) { return random() % 3 ? normal(i, random) : 0.0F; }},
    {"one in 20 is not zero",
     [](std::size_t i, auto& random) { return random() % 20 ? -0.0F : normal(i, random); }},
    {"one in 400 is not zero",
     [](std::size_t i, auto& random) { return random() % 400 ? 0.0F : normal(i, random); }},
    {"one in 400 is not finite",
     [](std::size_t i, auto& random) {
       constexpr float kBad[] = {NAN, -NAN, INFINITY, -INFINITY};
       return random() % 400 ? normal(i, random) : kBad[random() % 4];
     }},
    {"special",
     [](std::size_t, auto& random) { return draw_float(codec::Data::kSpecial, random); }},
    {"random bits",
     [](std::size_t, auto& random) { return draw_float(codec::Data::kRandomBits, random); }},
};

inline std::vector<float> draw(const Family& family, std::size_t n, std::mt19937_64& random) {
  std::vector<float> values(n);
  for (std::size_t i = 0; i < n; ++i) values[i] = family.draw(i, random);
  return values;
}

}  // namespace gradwire::cuda
