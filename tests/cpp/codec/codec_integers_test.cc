// What int8 and int4 have in common.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "codec_payloads.h"
#include "gradwire/codec/codec.h"

namespace gradwire::codec {
namespace codec_integers_test {

struct Case {
  const char* name;
  float most;  // the largest integer to which values are rounded at random
};

class Integers : public testing::TestWithParam<Case> {
 protected:
  std::shared_ptr<const Codec> codec(const std::string& options) const {
    return make_codec(GetParam().name + (":" + options));
  }
  Payload draw(const Values& x, std::uint64_t call, std::uint64_t element = 0) const {
    return encode(*at_random_, x, {.call = call, .element = element});
  }

  const float most_ = GetParam().most;
  std::shared_ptr<const Codec> at_random_ = codec("rounding=stochastic");
};

TEST_P(Integers, BlocksTooSmallForAScaleStayInTheError) {
  const Values x = {0x1.FFFFFEp-101F, -0x1p-149F, -0.0F};
  Values error(3);
  const auto codec = make_codec(GetParam().name);
  const Payload payload = encode(*codec, x, {.error = error.data()});
  EXPECT_EQ(decode(*codec, payload, 3), Values(3, 0.0F));
  EXPECT_EQ(error, x);
  EXPECT_GT(decode(*codec, encode(*codec, {0x1p-100F}), 1)[0], 0);
}

TEST_P(Integers, OneBadBlockLeavesTheOthers) {
  for (const char* options : {"block=32", "block=32,rounding=stochastic"})
    for (const float bad : {NAN, -NAN, INFINITY, -INFINITY}) {
      const auto of = codec(options);
      Values x(96, 2), y(96);
      x[40] = bad;
      const Payload payload = encode(*of, x);
      EXPECT_FALSE(of->decode(payload, y.data(), 96).finite);
      for (std::size_t i = 0; i < 96; ++i) EXPECT_EQ(std::isnan(y[i]), i / 32 == 1) << i;
    }
}

// 40,000 draws of variance f (1 - f), f the distance from the integer below: five deviations.
TEST_P(Integers, RoundedAtRandomAreUnbiased) {
  constexpr int kCalls = 40000;
  const Values x = {most_,    0.25F, -0.25F, 0.5F,         -0.5F,  0.01F,
                    -0.01F,   3.75F, -3.75F, most_ - 0.1F, -most_, std::nextafter(-most_, 0.0F),
                    4.00001F, 1e-6F};
  std::vector<double> sum(x.size());
  for (int call = 0; call < kCalls; ++call) {
    const Values y = decode(*at_random_, draw(x, static_cast<std::uint64_t>(call)), x.size());
    for (std::size_t i = 0; i < x.size(); ++i) sum[i] += y[i];
  }
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double f = x[i] - std::floor(x[i]);
    EXPECT_NEAR(sum[i] / kCalls, x[i], 5 * std::sqrt(f * (1 - f) / kCalls) + 2e-6) << x[i];
  }
}

TEST_P(Integers, RandomRoundingDependsOnSeedCallAndElementAlone) {
  Values x(500, 0.4F);
  x[7] = most_;
  const Payload first = draw(x, 3, 2048);
  EXPECT_EQ(draw(x, 3, 2048), first);
  EXPECT_NE(draw(x, 4, 2048), first);
  EXPECT_NE(draw(x, 3, 4096), first);
  EXPECT_NE(draw(x, 3, 2048 + (std::uint64_t{1} << 32)), first);
  at_random_ = codec("rounding=stochastic,seed=1");
  EXPECT_NE(draw(x, 3, 2048), first);
}

// The random numbers are part of the definition: these bytes may never change.
TEST_P(Integers, RandomRoundingDrawsTheDefinedNumbers) {
  const auto mixed = [](std::uint64_t z) {
    z += 0x9E3779B97F4A7C15U;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31);
  };
  at_random_ = codec("rounding=stochastic,seed=9");
  Values x(1024);
  for (std::size_t i = 0; i < x.size(); ++i)  // so that v and t are the same
    x[i] = i % 32 == 5 ? most_ : (2 * most_ - 1) / 1024 * static_cast<float>(i) - most_ + 0.5F;
  const Values y = decode(*at_random_, draw(x, 77, 3072), x.size());
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

INSTANTIATE_TEST_SUITE_P(Codecs, Integers, testing::Values(Case{"int8", 127}, Case{"int4", 7}),
                         [](const auto& each) { return std::string(each.param.name); });

TEST(Integers, ParametersAreCheckedAndNamesCanonical) {
  EXPECT_EQ(make_codec("int8:block=1024,rounding=nearest,seed=0")->name(), "int8");
  EXPECT_EQ(make_codec("int4:block=32,rounding=nearest,seed=0")->name(), "int4");
  for (const std::string name : {"int8", "int4"})
    EXPECT_EQ(make_codec(name + ":seed=4,rounding=stochastic,block=64")->name(),
              name + ":block=64,rounding=stochastic,seed=4");
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
      {"int4:block=0", "32, 64, 128"},
      {"int4:block=96", "32, 64, 128"},
      {"int4:block=1024", "32, 64, 128"},
      {"int4:rounding=up", "nearest, stochastic"},
      {"int4:seed=1", "rounding=stochastic"},
      {"int4:speed=1", "it takes block, rounding, seed"},
  };
  for (const auto& [name, text] : refused) expect_refused(name, text);
}

}  // namespace codec_integers_test
}  // namespace gradwire::codec
