#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "codec_payloads.h"
#include "codec_reference.h"
#include "gradwire/codec/codec.h"

namespace gradwire::codec {
namespace codec_int4_test {

constexpr float kMost = std::numeric_limits<float>::max();
constexpr float kMostScale = 0x1.FEp127F;
constexpr std::size_t kUnit = 1024;

void put_scale(Payload& payload, std::size_t at, float scale) {
  const auto top = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(scale) >> 16);
  std::memcpy(payload.data() + at, &top, sizeof top);
}
float scale_of(const Payload& payload, std::size_t block = 0) {
  std::uint16_t top = 0;
  std::memcpy(&top, payload.data() + 2 * block, sizeof top);
  return std::bit_cast<float>(std::uint32_t{top} << 16);
}

// As int4.cc defines it, one element at a time.
struct Block {
  float scale = 0, inverse = 0;

  Block(const float* x, std::size_t n) {
    float plus = 0, minus = 0;
    for (std::size_t i = 0; i < n; ++i) {
      plus = std::max(plus, x[i]);
      minus = std::max(minus, -x[i]);
    }
    const float most = std::max(plus, minus);
    if (most < 0x1p-100F) return;
    std::uint32_t bits = std::bit_cast<std::uint32_t>(most);
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000U;
    scale = std::min(std::bit_cast<float>(bits), kMostScale);
    if (minus >= plus) scale = -scale;
    inverse = 1 / scale;
  }
  int code(float v) const {
    const float t = v * inverse, slope = 12 - 4 * std::fabs(t);
    return std::max(-7, static_cast<int>(std::nearbyint(t * slope)));
  }
};

Payload by_definition(const Values& x, std::size_t block) {
  Payload payload;
  for (std::size_t unit = 0; unit < x.size(); unit += kUnit) {
    const std::size_t n = std::min(kUnit, x.size() - unit), first = payload.size();
    const std::size_t blocks = (n + block - 1) / block;
    payload.resize(first + 2 * blocks + n / 32 * 16 + std::min<std::size_t>(n % 32, 16));
    for (std::size_t b = 0; b < blocks; ++b) {
      const Block its(&x[unit + b * block], std::min(block, n - b * block));
      put_scale(payload, first + 2 * b, its.scale);
      for (std::size_t i = b * block; i < std::min((b + 1) * block, n); ++i) {
        const int code = its.code(x[unit + i]) & 15;
        std::byte& pair = payload[first + 2 * blocks + i / 32 * 16 + i % 16];
        pair |= static_cast<std::byte>(i % 32 < 16 ? code : code << 4);
      }
    }
  }
  return payload;
}

TEST(Int4, EncodesLikeTheDefinition) {
  std::mt19937_64 random(2);
  for (const std::size_t block : {32, 64, 128})
    for (const Data data : {Data::kNormal, Data::kHuge, Data::kDenormal})
      for (const std::size_t tail : {0, 1, 13, 16, 29, 70}) {
        Values x(2 * kUnit + tail);
        for (float& each : x) each = draw_float(data, random);
        const auto codec = make_codec("int4:block=" + std::to_string(block));
        EXPECT_EQ(encode(*codec, x), by_definition(x, block)) << block << " " << tail;
      }
}

TEST(Int4, TakesFourAndAHalfBitsAnElement) {
  const auto codec = make_codec("int4");
  EXPECT_TRUE(codec->fixed_size());
  EXPECT_EQ(codec->max_bytes(1 << 20) * 8, (1 << 20) * 4.5);
  EXPECT_EQ(codec->max_bytes(1), 3U);
  EXPECT_EQ(codec->max_bytes(17), 18U);
  EXPECT_EQ(codec->max_bytes(33), 21U);
  EXPECT_EQ(make_codec("int4:block=128")->max_bytes(1 << 20) * 8, (1 << 20) * 4.125);
}

float level(int q) {
  return std::copysign((3 - std::sqrt(9 - std::fabs(static_cast<float>(q)))) / 2,
                       static_cast<float>(q));
}

TEST(Int4, HasSixteenLevelsAtWhichItIsExact) {
  const auto codec = make_codec("int4");
  Values up, down;
  for (int q = -7; q <= 8; ++q) {
    up.push_back(level(q));
    down.push_back(level(q) * -0.25F);
  }
  EXPECT_EQ(decode(*codec, encode(*codec, up), up.size()), up);
  EXPECT_EQ(decode(*codec, encode(*codec, down), down.size()), down);
  EXPECT_EQ(decode(*codec, encode(*codec, {-1, 1, -0.9F}), 3), (Values{-1, level(7), -1}));
}

// Equal steps, 7 on each side, lose 0.0095 of the squares of these.
TEST(Int4, LosesLittleOfNormalValues) {
  std::mt19937_64 random(5);
  std::normal_distribution<float> normal;
  Values x(64 * kUnit), error(x.size());
  double lost = 0, all = 0;
  for (float& each : x) each = normal(random);
  encode(*make_codec("int4"), x, {.error = error.data()});
  for (std::size_t i = 0; i < x.size(); ++i) {
    lost += error[i] * error[i];
    all += x[i] * x[i];
  }
  EXPECT_NEAR(lost / all, 0.0068, 0.0002);
}

TEST(Int4, ScalesThatAreNotFiniteAreNan) {
  const auto codec = make_codec("int4");
  const Payload good = encode(*codec, {kMost, 1, -kMost});
  EXPECT_EQ(scale_of(good), -kMostScale);
  for (const float scale : {NAN, -NAN, INFINITY, -INFINITY}) {
    Payload payload = good;
    put_scale(payload, 0, scale);
    Values y(3), sum(3, 1);
    EXPECT_FALSE(codec->decode(payload, y.data(), 3).finite) << scale;
    EXPECT_FALSE(codec->decode_add(payload, sum.data(), 3).finite) << scale;
    for (std::size_t i = 0; i < 3; ++i)
      EXPECT_TRUE(std::isnan(y[i]) && std::isnan(sum[i])) << scale;
  }
}

TEST(Int4, NoCodeDecodesToInf) {
  for (const char* spec : {"int4", "int4:rounding=stochastic"})
    for (const float most : {kMost, -kMost}) {
      const auto codec = make_codec(spec);
      Payload payload = encode(*codec, Values(32, most));
      for (std::size_t i = 0; i < 16; ++i) payload[2 + i] = static_cast<std::byte>(0x11 * i);
      for (const float y : decode(*codec, payload, 32)) EXPECT_TRUE(std::isfinite(y)) << spec;
    }
}

TEST(Int4, RoundedAtRandomNeverLeavesTheRange) {
  const auto codec = make_codec("int4:rounding=stochastic");
  for (std::uint32_t tail = 0; tail < 2000; ++tail) {
    const float most = std::bit_cast<float>(0x3F800000U + tail * 4099U);
    const Payload payload = encode(*codec, {most, -most}, {.call = tail});
    const float scale = scale_of(payload);
    EXPECT_GE(scale, most);
    for (const float y : decode(*codec, payload, 2)) EXPECT_LE(std::fabs(y), scale) << most;
  }
}

}  // namespace codec_int4_test
}  // namespace gradwire::codec
