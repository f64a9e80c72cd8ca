#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "codec_reference.h"
#include "gradwire/base/error.h"
#include "gradwire/codec/codec.h"

namespace gradwire::codec {
namespace codec_int4_test {

using Values = std::vector<float>;
using Payload = std::vector<std::byte>;

constexpr float kMost = std::numeric_limits<float>::max();
constexpr float kMostScale = 0x1.FEp127F;
constexpr std::size_t kUnit = 1024;

Payload encode(const Codec& codec, const Values& x, EncodeContext context = {}) {
  Payload payload(codec.max_bytes(x.size()));
  EXPECT_EQ(codec.encode(x.data(), x.size(), context, payload), payload.size());
  return payload;
}

Values decode(const Codec& codec, const Payload& payload, std::size_t n) {
  Values y(n);
  EXPECT_EQ(codec.decode(payload, y.data(), n).bytes, payload.size());
  return y;
}

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

TEST(Int4, BlocksTooSmallForAScaleStayInTheError) {
  const Values x = {0x1.FFFFFEp-101F, -0x1p-149F, -0.0F};
  Values error(3);
  const auto codec = make_codec("int4");
  const Payload payload = encode(*codec, x, {.error = error.data()});
  EXPECT_EQ(decode(*codec, payload, 3), Values(3, 0.0F));
  EXPECT_EQ(error, x);
  EXPECT_GT(decode(*codec, encode(*codec, {0x1p-100F}), 1)[0], 0);
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

TEST(Int4, OneBadBlockLeavesTheOthers) {
  for (const char* spec : {"int4", "int4:rounding=stochastic"})
    for (const float bad : {NAN, -NAN, INFINITY, -INFINITY}) {
      const auto codec = make_codec(spec);
      Values x(96, 2), y(96);
      x[40] = bad;
      const Payload payload = encode(*codec, x);
      EXPECT_FALSE(codec->decode(payload, y.data(), 96).finite);
      for (std::size_t i = 0; i < 96; ++i) EXPECT_EQ(std::isnan(y[i]), i / 32 == 1) << i;
    }
}

class StochasticInt4 : public testing::Test {
 protected:
  Payload draw(const Values& x, std::uint64_t call, std::uint64_t element = 0) {
    return encode(*codec_, x, {.call = call, .element = element});
  }

  std::shared_ptr<const Codec> codec_ = make_codec("int4:rounding=stochastic");
};

// 40,000 draws of variance f (1 - f), f the distance from the integer below: five deviations.
TEST_F(StochasticInt4, IsUnbiased) {
  constexpr int kCalls = 40000;
  const Values x = {7,     0.25F,  -0.25F, 0.5F, -0.5F,       0.01F,    -0.01F,
                    3.75F, -3.75F, 6.9F,   -7,   -6.9999995F, 4.00001F, 1e-6F};
  std::vector<double> sum(x.size());
  for (int call = 0; call < kCalls; ++call) {
    const Values y = decode(*codec_, draw(x, static_cast<std::uint64_t>(call)), x.size());
    for (std::size_t i = 0; i < x.size(); ++i) sum[i] += y[i];
  }
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double f = x[i] - std::floor(x[i]);
    EXPECT_NEAR(sum[i] / kCalls, x[i], 5 * std::sqrt(f * (1 - f) / kCalls) + 2e-6) << x[i];
  }
}

TEST_F(StochasticInt4, DependsOnSeedCallAndElementAlone) {
  Values x(500, 0.4F);
  x[7] = 7;
  const Payload first = draw(x, 3, 2048);
  EXPECT_EQ(draw(x, 3, 2048), first);
  EXPECT_NE(draw(x, 4, 2048), first);
  EXPECT_NE(draw(x, 3, 4096), first);
  codec_ = make_codec("int4:rounding=stochastic,seed=1");
  EXPECT_NE(draw(x, 3, 2048), first);
}

// The random numbers are part of the definition: these bytes may never change.
TEST_F(StochasticInt4, DrawsTheDefinedNumbers) {
  const auto mixed = [](std::uint64_t z) {
    z += 0x9E3779B97F4A7C15U;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31);
  };
  codec_ = make_codec("int4:rounding=stochastic,seed=9");
  Values x(kUnit);
  for (std::size_t i = 0; i < x.size(); ++i)
    x[i] = i % 32 == 5 ? 7 : 0.013F * static_cast<float>(i) - 6.5F;  // so that v and t are the same
  const Values y = decode(*codec_, draw(x, 77, 3072), x.size());
  const std::uint64_t key = mixed(mixed(mixed(9) ^ 77) ^ 3072);
  for (std::size_t i = 0; i < x.size(); ++i) {
    auto h = static_cast<std::uint32_t>(i) * 0x9E3779B9U + static_cast<std::uint32_t>(key);
    h = (h ^ (h >> 16)) * 0x7FEB352DU;
    h = ((h ^ (h >> 15)) + static_cast<std::uint32_t>(key >> 32)) * 0x846CA68BU;
    h ^= h >> 16;
    const float u = std::ldexp(static_cast<float>(h >> 9), -23), below = std::floor(x[i]);
    ASSERT_EQ(std::nearbyint(y[i]), below + (u < x[i] - below ? 1 : 0)) << i;
  }
}

TEST_F(StochasticInt4, NeverLeavesTheRange) {
  for (std::uint32_t tail = 0; tail < 2000; ++tail) {
    const float most = std::bit_cast<float>(0x3F800000U + tail * 4099U);
    const Payload payload = draw({most, -most}, tail);
    const float scale = scale_of(payload);
    EXPECT_GE(scale, most);
    for (const float y : decode(*codec_, payload, 2)) EXPECT_LE(std::fabs(y), scale) << most;
  }
}

TEST(Int4, ParametersAreCheckedAndNamesCanonical) {
  EXPECT_EQ(make_codec("int4:block=32,rounding=nearest,seed=0")->name(), "int4");
  EXPECT_EQ(make_codec("int4:seed=4,rounding=stochastic,block=64")->name(),
            "int4:block=64,rounding=stochastic,seed=4");
  const std::pair<const char*, const char*> refused[] = {
      {"int4:block=0", "32, 64, 128"},        {"int4:block=96", "32, 64, 128"},
      {"int4:block=1024", "32, 64, 128"},     {"int4:rounding=up", "nearest, stochastic"},
      {"int4:seed=1", "rounding=stochastic"}, {"int4:speed=1", "it takes block, rounding, seed"},
  };
  for (const auto& [spec, expected] : refused) {
    try {
      make_codec(spec);
      ADD_FAILURE() << spec << " was accepted";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(expected), std::string::npos) << error.what();
    }
  }
}

}  // namespace codec_int4_test
}  // namespace gradwire::codec
