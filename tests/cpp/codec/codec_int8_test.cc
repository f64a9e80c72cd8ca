#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "codec_reference.h"
#include "gradwire/base/error.h"
#include "gradwire/codec/codec.h"

namespace gradwire::codec {
namespace codec_int8_test {

using Values = std::vector<float>;
using Payload = std::vector<std::byte>;

constexpr float kMost = std::numeric_limits<float>::max();

Payload encode(const Codec& codec, const Values& x, EncodeContext context = {}) {
  Payload payload(codec.max_bytes(x.size()));
  EXPECT_EQ(codec.encode(x.data(), x.size(), context, payload), payload.size());
  return payload;
}

Values decode(const Codec& codec, const Payload& payload, std::size_t n) {
  Values y(n);
  codec.decode(payload, y.data(), n);
  return y;
}

// As int8.cc defines it, one element at a time.
Payload by_definition(const Values& x, std::size_t block) {
  Payload payload;
  for (std::size_t begin = 0; begin < x.size(); begin += block) {
    const std::size_t end = std::min(begin + block, x.size());
    float most = 0;
    for (std::size_t i = begin; i < end; ++i) most = std::max(most, std::fabs(x[i]));
    const bool tiny = most < 0x1p-100F;
    const float scale = tiny ? 0 : std::min(most / 127, kMost / 128);
    const float inverse = tiny ? 0 : 127 / most;
    const auto bytes = std::as_bytes(std::span(&scale, 1));
    payload.insert(payload.end(), bytes.begin(), bytes.end());
    for (std::size_t i = begin; i < end; ++i) {
      const float t = x[i] * inverse;
      payload.push_back(static_cast<std::byte>(static_cast<int>(std::nearbyint(t))));
    }
  }
  return payload;
}

float scale_of(const Payload& payload) {
  float scale = 0;
  std::memcpy(&scale, payload.data(), sizeof scale);
  return scale;
}

void set_scale(Payload& payload, float scale) { std::memcpy(payload.data(), &scale, sizeof scale); }

TEST(Int8, EncodesLikeTheDefinition) {
  std::mt19937_64 random(2);
  for (const std::size_t block : {32, 1024})
    for (const Data data : {Data::kNormal, Data::kHuge, Data::kDenormal}) {
      Values x(5 * block + 13);
      for (float& each : x) each = draw_float(data, random);
      const auto codec = make_codec("int8:block=" + std::to_string(block));
      EXPECT_EQ(encode(*codec, x), by_definition(x, block));
    }
}

TEST(Int8, TakesFourBytesABlockAndOneAnElement) {
  const auto codec = make_codec("int8");
  EXPECT_EQ(codec->block(), 1024U);
  EXPECT_TRUE(codec->fixed_size());
  EXPECT_EQ(codec->max_bytes(1024), 1028U);
  EXPECT_EQ(codec->max_bytes(1025), 1033U);
}

TEST(Int8, TiesGoToEven) {
  const Values x = {127, 0.5F, 1.5F, 2.5F, -0.5F, -1.5F, 126.5F};
  EXPECT_EQ(decode(*make_codec("int8"), encode(*make_codec("int8"), x), x.size()),
            (Values{127, 0, 2, 2, 0, -2, 126}));
}

TEST(Int8, ErrorIsAtMostHalfAStep) {
  std::mt19937_64 random(5);
  Values x(1024), error(1024);
  for (float& each : x) each = draw_float(Data::kNormal, random);
  const Payload payload = encode(*make_codec("int8"), x, {.error = error.data()});
  for (const float each : error) ASSERT_LE(std::fabs(each), 0.5001F * scale_of(payload));
}

TEST(Int8, BlocksTooSmallForAScaleStayInTheError) {
  const Values x = {0x1.FFFFFEp-101F, -0x1p-149F, -0.0F};
  Values error(3);
  const auto codec = make_codec("int8");
  const Payload payload = encode(*codec, x, {.error = error.data()});
  EXPECT_EQ(decode(*codec, payload, 3), Values(3, 0.0F));
  EXPECT_EQ(error, x);
  EXPECT_GT(decode(*codec, encode(*codec, {0x1p-100F}), 1)[0], 0);
}

TEST(Int8, ScalesThatNobodyWritesAreNan) {
  const auto codec = make_codec("int8");
  const Payload good = encode(*codec, {kMost, 1, -kMost});
  for (const float scale : {NAN, -1.0F, INFINITY, kMost, std::nextafter(kMost / 128, kMost)}) {
    Payload payload = good;
    set_scale(payload, scale);
    Values y(3), sum(3, 1);
    EXPECT_FALSE(codec->decode(payload, y.data(), 3).finite) << scale;
    EXPECT_FALSE(codec->decode_add(payload, sum.data(), 3).finite) << scale;
    for (std::size_t i = 0; i < 3; ++i)
      EXPECT_TRUE(std::isnan(y[i]) && std::isnan(sum[i])) << scale;
  }
}

TEST(Int8, NoByteDecodesToInf) {
  const auto codec = make_codec("int8");
  Payload payload = encode(*codec, Values(256, kMost));
  for (std::size_t i = 0; i < 256; ++i) payload[4 + i] = static_cast<std::byte>(i);
  Values y(256);
  EXPECT_TRUE(codec->decode(payload, y.data(), 256).finite);
  for (std::size_t i = 0; i < 256; ++i)
    EXPECT_EQ(y[i], static_cast<float>(static_cast<std::int8_t>(i)) * scale_of(payload));
}

TEST(Int8, OneBadBlockLeavesTheOthers) {
  const auto codec = make_codec("int8:block=32");
  Values x(96, 2);
  x[40] = NAN;
  const Payload payload = encode(*codec, x);
  Values y(96);
  EXPECT_FALSE(codec->decode(payload, y.data(), 96).finite);
  for (std::size_t i = 0; i < 96; ++i) EXPECT_EQ(std::isnan(y[i]), i / 32 == 1) << i;
}

class Stochastic : public testing::Test {
 protected:
  Payload draw(const Values& x, std::uint64_t call, std::uint64_t element = 0) {
    return encode(*codec_, x, {.call = call, .element = element});
  }

  std::shared_ptr<const Codec> codec_ = make_codec("int8:rounding=stochastic");
};

// 40,000 draws of variance f (1 - f), f the distance from the integer below: five deviations.
TEST_F(Stochastic, IsUnbiased) {
  constexpr int kCalls = 40000;
  const Values x = {127,   0.25F,  -0.25F, 0.5F, -0.5F,       0.01F,     -0.01F,
                    3.75F, -3.75F, 126.9F, 42,   -126.99999F, 64.00001F, 1e-6F};
  std::vector<double> sum(x.size());
  for (int call = 0; call < kCalls; ++call) {
    const Values y = decode(*codec_, draw(x, static_cast<std::uint64_t>(call)), x.size());
    for (std::size_t i = 0; i < x.size(); ++i) sum[i] += y[i];
  }
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double f = x[i] - std::floor(x[i]);
    EXPECT_NEAR(sum[i] / kCalls, x[i], 5 * std::sqrt(f * (1 - f) / kCalls) + 1e-6) << x[i];
  }
}

TEST_F(Stochastic, ElementsOfACallAreIndependent) {
  Values x(1024, 0.5F);
  x[0] = 127;
  int ups = 0, changes = 0, both = 0;
  for (std::uint64_t call = 0; call < 200; ++call) {
    const Values y = decode(*codec_, draw(x, call), x.size());
    for (std::size_t i = 2; i < x.size(); ++i) {
      ups += y[i] == 1;
      changes += y[i] != y[i - 1];
      both += y[i] == 1 && y[(i + 511) % 1022 + 2] == 1;
    }
  }
  const double trials = 200 * 1022.0, sigma = std::sqrt(trials) / 2;
  EXPECT_NEAR(ups, trials / 2, 5 * sigma);
  EXPECT_NEAR(changes, trials / 2, 5 * sigma);
  EXPECT_NEAR(both, trials / 4, 5 * sigma);
}

TEST_F(Stochastic, DependsOnSeedCallAndElementAlone) {
  Values x(500, 0.4F);
  x[7] = 127;
  const Payload first = draw(x, 3, 2048);
  EXPECT_EQ(draw(x, 3, 2048), first);
  EXPECT_NE(draw(x, 4, 2048), first);
  EXPECT_NE(draw(x, 3, 4096), first);
  EXPECT_NE(draw(x, 3, 2048 + (std::uint64_t{1} << 32)), first);
  codec_ = make_codec("int8:rounding=stochastic,seed=1");
  EXPECT_NE(draw(x, 3, 2048), first);
}

// The random numbers are part of the definition: these bytes may never change.
TEST_F(Stochastic, DrawsTheDefinedNumbers) {
  const auto mixed = [](std::uint64_t z) {
    z += 0x9E3779B97F4A7C15U;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31);
  };
  codec_ = make_codec("int8:rounding=stochastic,seed=9");
  Values x(1024);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = 0.13F * static_cast<float>(i) - 66;
  x[5] = 127;  // so that v and t are the same
  const Values y = decode(*codec_, draw(x, 77, 3072), x.size());
  const std::uint64_t key = mixed(mixed(mixed(9) ^ 77) ^ 3072);
  for (std::size_t i = 0; i < x.size(); ++i) {
    auto h = static_cast<std::uint32_t>(i) * 0x9E3779B9U + static_cast<std::uint32_t>(key);
    h = (h ^ (h >> 16)) * 0x7FEB352DU;
    h = ((h ^ (h >> 15)) + static_cast<std::uint32_t>(key >> 32)) * 0x846CA68BU;
    h ^= h >> 16;
    const float u = std::ldexp(static_cast<float>(h >> 9), -23), below = std::floor(x[i]);
    ASSERT_EQ(y[i], below + (u < x[i] - below ? 1 : 0)) << i;
  }
}

TEST_F(Stochastic, NeverLeavesTheRange) {
  for (std::uint32_t tail = 0; tail < 2000; ++tail) {
    const float most = std::bit_cast<float>(0x3F800000U + tail * 4099U);
    Values error(2);
    const Payload payload = encode(*codec_, {most, -most}, {.call = tail, .error = error.data()});
    EXPECT_EQ(static_cast<std::int8_t>(payload[4]), 127) << most;
    EXPECT_EQ(static_cast<std::int8_t>(payload[5]), -127) << most;
  }
}

TEST(Int8, ParametersAreCheckedAndNamesCanonical) {
  EXPECT_EQ(make_codec("int8:block=1024,rounding=nearest,seed=0")->name(), "int8");
  EXPECT_EQ(make_codec("int8:seed=4,rounding=stochastic,block=64")->name(),
            "int8:block=64,rounding=stochastic,seed=4");
  const std::pair<const char*, const char*> refused[] = {
      {"int8:block=0", "32 to 65536"},
      {"int8:block=33", "multiple of 32"},
      {"int8:block=1e3", "not an integer"},
      {"int8:block=", "empty"},
      {"int8:block=-32", "not an integer"},
      {"int8:block=131072", "32 to 65536"},
      {"int8:rounding=up", "nearest, stochastic"},
      {"int8:seed=1", "rounding=stochastic"},
      {"int8:speed=1", "it takes block, rounding, seed"},
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

}  // namespace codec_int8_test
}  // namespace gradwire::codec
