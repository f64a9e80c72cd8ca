#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "codec_payloads.h"
#include "codec_reference.h"
#include "gradwire/codec/codec.h"

namespace gradwire::codec {
namespace codec_int8_test {

constexpr float kMost = std::numeric_limits<float>::max();

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

TEST(Int8, RandomElementsOfACallAreIndependent) {
  const auto codec = make_codec("int8:rounding=stochastic");
  Values x(1024, 0.5F);
  x[0] = 127;
  int ups = 0, changes = 0, both = 0;
  for (std::uint64_t call = 0; call < 200; ++call) {
    const Values y = decode(*codec, encode(*codec, x, {.call = call}), x.size());
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

TEST(Int8, RoundedAtRandomNeverLeavesTheRange) {
  const auto codec = make_codec("int8:rounding=stochastic");
  for (std::uint32_t tail = 0; tail < 2000; ++tail) {
    const float most = std::bit_cast<float>(0x3F800000U + tail * 4099U);
    Values error(2);
    const Payload payload = encode(*codec, {most, -most}, {.call = tail, .error = error.data()});
    EXPECT_EQ(static_cast<std::int8_t>(payload[4]), 127) << most;
    EXPECT_EQ(static_cast<std::int8_t>(payload[5]), -127) << most;
  }
}

}  // namespace codec_int8_test
}  // namespace gradwire::codec
