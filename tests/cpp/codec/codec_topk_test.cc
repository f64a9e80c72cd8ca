// topk: its definition. What it shares with every codec is tested in codec_conformance_test.cc, its
// selection in codec_sparse_test.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "codec_payloads.h"
#include "codec_reference.h"
#include "gradwire/base/error.h"
#include "gradwire/codec/codec.h"

namespace gradwire::codec {
namespace codec_topk_test {

Values draw(std::size_t n, std::mt19937_64& random) {
  Values x(n);
  for (float& each : x) each = draw_float(Data::kNormal, random);
  return x;
}

// Selects by sorting each unit.
Values largest(const Values& v, std::size_t unit, double density) {
  Values y(v.size());
  for (std::size_t first = 0; first < v.size(); first += unit) {
    const std::size_t n = std::min(unit, v.size() - first);
    std::vector<std::size_t> order(n);
    std::iota(order.begin(), order.end(), first);
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return std::fabs(v[a]) > std::fabs(v[b]);
    });
    order.resize(std::max<std::size_t>(
        1, static_cast<std::size_t>(std::llround(density * static_cast<double>(n)))));
    for (const std::size_t i : order) y[i] = v[i];
  }
  return y;
}

TEST(TopK, SendsTheLargestOfEachUnit) {
  std::mt19937_64 random(1);
  for (const double density : {0.001, 0.01, 0.1, 0.6, 0.99, 1.0}) {
    const auto codec = make_codec("topk:density=" + std::to_string(density));
    const Values x = draw(2 * codec->block() + 777, random), residual = draw(x.size(), random);
    Values v(x.size()), error(x.size());
    std::transform(x.begin(), x.end(), residual.begin(), v.begin(), std::plus<float>());
    CodecState codec_state;
    const Values expected = largest(v, codec->block(), density);
    for (int call = 0; call < 3; ++call) {  // with another filter each time
      const Payload payload =
          encode(*codec, x,
                 {.residual = residual.data(), .error = error.data(), .codec_state = &codec_state});
      ASSERT_EQ(decode(*codec, payload, x.size()), expected) << density;
      for (std::size_t i = 0; i < v.size(); ++i)
        ASSERT_EQ(error[i], expected[i] == 0 ? v[i] : 0) << density;
    }
  }
}

TEST(TopK, TiesGoToTheLowerIndex) {
  const auto codec = make_codec("topk:density=0.3");
  const Values x = {1, -2, 2, -2, 1, 2, 0, 0, 0, 0};
  EXPECT_EQ(decode(*codec, encode(*codec, x), 10), (Values{0, -2, 2, -2, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(decode(*codec, encode(*codec, Values(10, 7)), 10),
            (Values{7, 7, 7, 0, 0, 0, 0, 0, 0, 0}));
}

TEST(TopK, AtLeastOneElementIsSent) {
  const auto codec = make_codec("topk");
  EXPECT_EQ(decode(*codec, encode(*codec, {0.5F, -3}), 2), (Values{0, -3}));
  EXPECT_EQ(decode(*codec, encode(*codec, {0.25F}), 1), (Values{0.25F}));
}

TEST(TopK, AnyFilterGivesTheSameBytes) {
  const auto codec = make_codec("topk:density=0.01");
  std::mt19937_64 random(2);
  const Values x = draw(codec->block() + 5, random);
  const Payload expected = encode(*codec, x);
  for (const float filter : {1e-30F, 0.01F, 1.0F, 1e30F, NAN, INFINITY, -INFINITY, -1.0F}) {
    CodecState codec_state{.filter = filter};
    EXPECT_EQ(encode(*codec, x, {.codec_state = &codec_state}), expected) << filter;
  }
}

TEST(TopK, NamesKeepTheirParameters) {
  for (const char* spec :
       {"topk", "topk:density=0.01", "topk:density=0.25,values=bf16", "topk:values=2bit"})
    EXPECT_EQ(make_codec(spec)->name(), spec);
  for (const char* spec : {"topk:density=0", "topk:density=2", "topk:density=nan", "topk:density=x",
                           "topk:values=int8", "topk:k=3"})
    EXPECT_THROW(make_codec(spec), InvalidArgument) << spec;
}

TEST(TopK, IsGatheredWhileWhatTheOthersSendIsLittle) {
  EXPECT_TRUE(make_codec("topk")->gathers(16));
  EXPECT_FALSE(make_codec("topk")->gathers(17));
  EXPECT_TRUE(make_codec("topk:density=0.01")->gathers(7));
  EXPECT_FALSE(make_codec("topk:density=0.01")->gathers(8));
  EXPECT_TRUE(make_codec("topk:density=1")->gathers(2));
  EXPECT_FALSE(make_codec("topk:density=0.1")->gathers(3));
}

TEST(TopK, HalfValuesHalveTheirBytesAndBookWhatTheyRound) {
  std::mt19937_64 random(3);
  const auto full = make_codec("topk:density=0.1");
  const Values x = draw(full->block(), random), exact = decode(*full, encode(*full, x), x.size());
  for (const char* spec : {"topk:density=0.1,values=fp16", "topk:density=0.1,values=bf16"}) {
    const auto codec = make_codec(spec);
    Values error(x.size());
    const Payload payload = encode(*codec, x, {.error = error.data()});
    EXPECT_EQ(encode(*full, x).size() - payload.size(), 2 * 3277U) << spec;
    const Values y = decode(*codec, payload, x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      ASSERT_EQ(y[i] == 0, exact[i] == 0) << spec;
      ASSERT_EQ(y[i] + error[i], x[i]) << spec;
    }
  }
  const Values huge(1, 1e30F);
  Values error(1);
  const auto half = make_codec("topk:values=fp16");
  EXPECT_EQ(decode(*half, encode(*half, huge, {.error = error.data()}), 1)[0], 65504);
  EXPECT_EQ(error[0], 1e30F - 65504);
}

// ---- values=2bit --------------------------------------------------------------------------------

// A group in two bits, as codec/two_bits.h defines it, in double: exact, since m is an integer.
Values in_two_bits(const Values& v) {
  double largest = 0;
  for (const float each : v) largest = std::max(largest, std::fabs(double{each}));
  Values y(v.size());
  if (largest < 0x1p-100) return y;
  const double unit = std::exp2(std::floor(std::log2(largest)) - 21);
  std::vector<double> m;
  for (const float each : v) m.push_back(std::floor(std::fabs(double{each}) / unit));
  const double split =
      std::floor(std::accumulate(m.begin(), m.end(), 0.0) / static_cast<double>(m.size()));
  std::array<double, 2> sum{}, count{};
  for (const double each : m) {
    sum[each > split ? 1 : 0] += each;
    count[each > split ? 1 : 0] += 1;
  }
  const auto bf16 = make_codec("bf16");
  for (std::size_t i = 0; i < v.size(); ++i) {
    const std::size_t high = m[i] > split ? 1 : 0;
    const auto level = static_cast<float>(std::floor(sum[high] / count[high]) * unit);
    y[i] = std::copysign(decode(*bf16, encode(*bf16, {level}), 1)[0], v[i]);
  }
  return y;
}

TEST(TopK, TwoBitsAreTheSignAndOneOfTwoMeansOfTheGroup) {
  std::mt19937_64 random(11);
  const auto codec = make_codec("topk:density=1,values=2bit");
  for (const std::size_t n : {1, 2, 511, 512}) {
    for (const float scale : {1.0F, 0x1p-99F, 0x1p-101F, 0x1p-140F, 0x1p110F}) {
      Values x = draw(n, random), error(n);
      for (float& each : x) each *= scale;
      const Payload payload = encode(*codec, x, {.error = error.data()});
      const Values expected = in_two_bits(x);
      ASSERT_EQ(decode(*codec, payload, n), expected) << n << ", " << scale;
      for (std::size_t i = 0; i < n; ++i) ASSERT_EQ(error[i], x[i] - expected[i]);
    }
  }
  EXPECT_EQ(in_two_bits({1, 1, -3, 5}), (Values{1, 1, -4, 4}));
}

TEST(TopK, TwoBitsOfEveryGroupHaveTheirOwnLevels) {
  const auto codec = make_codec("topk:density=1,values=2bit");
  Values x(1024 + 3, 1);
  std::fill_n(x.begin() + 512, 512, -0x1p-50F);
  std::fill(x.begin() + 1024, x.end(), 3e38F);
  const Values y = decode(*codec, encode(*codec, x), x.size());
  EXPECT_TRUE(std::equal(x.begin(), x.begin() + 1024, y.begin()));
  EXPECT_NEAR(y.back() / 3e38F, 1, 1.0 / 256);
}

// SparseLoCo's 1.56 %: 0.119 bits an element for positions, 2/64 for values, 0.001 for levels.
TEST(TopK, TwoBitsAreA195thOfFloat32AtDensity1In64) {
  std::mt19937_64 random(12);
  const Values x = draw(1 << 20, random);
  const auto codec = make_codec("topk:density=0.015625,values=2bit");
  const double ratio =
      4.0 * static_cast<double>(x.size()) / static_cast<double>(encode(*codec, x).size());
  RecordProperty("ratio", std::to_string(ratio));
  EXPECT_GE(ratio, 195);
}

TEST(TopK, TwoBitsThatAreNotFiniteAreReported) {
  const auto codec = make_codec("topk:density=1,values=2bit");
  Payload payload = encode(*codec, {1, 2, 3});
  for (const std::size_t high_byte : {2, 4}) payload[high_byte] = std::byte{0x7F};
  for (const std::size_t low_byte : {1, 3}) payload[low_byte] = std::byte{0xFF};
  Values y(3);
  EXPECT_FALSE(codec->decode(payload, y.data(), 3).finite);
  payload.pop_back();
  EXPECT_THROW(codec->decode(payload, y.data(), 3), InvalidArgument);
}

// Positions cost about 11.5, 8.1 and 4.8 bits, values 32.
TEST(TopK, BytesFollowTheDensity) {
  std::mt19937_64 random(4);
  const Values x = draw(1 << 20, random);
  for (const auto& [spec, density, most_bits] :
       {std::tuple("topk:density=0.001", 0.001, 45.5), std::tuple("topk:density=0.01", 0.01, 40.6),
        std::tuple("topk:density=0.1", 0.1, 37.1)}) {
    const double bits = 8 * static_cast<double>(encode(*make_codec(spec), x).size());
    EXPECT_LE(bits / (density * static_cast<double>(x.size())), most_bits) << spec;
  }
}

TEST(TopK, DeliversEverythingOverManyCalls) {
  for (const char* spec :
       {"topk:density=0.01", "topk:density=0.01,values=bf16", "topk:density=0.02,values=2bit"}) {
    const auto codec = make_codec(spec);
    const std::size_t n = codec->block() + 1000;
    std::mt19937_64 random(5);
    Values residual(n);
    std::vector<double> given(n), delivered(n);
    CodecState codec_state;
    for (int call = 0; call < 100; ++call) {
      const Values x = draw(n, random);
      const EncodeContext context{
          .residual = residual.data(), .error = residual.data(), .codec_state = &codec_state};
      const Values y = decode(*codec, encode(*codec, x, context), n);
      for (std::size_t i = 0; i < n; ++i) given[i] += x[i], delivered[i] += y[i];
    }
    for (std::size_t i = 0; i < n; ++i)
      ASSERT_NEAR(delivered[i] + residual[i], given[i], 1e-2) << spec;
  }
}

TEST(TopK, ValuesThatAreNotFiniteAreReported) {
  const auto codec = make_codec("topk");
  Payload payload = encode(*codec, {1.0F});
  ASSERT_EQ(payload.size(), 5U);
  const float inf = INFINITY;
  std::memcpy(payload.data() + 1, &inf, 4);
  float y = 0;
  EXPECT_FALSE(codec->decode(payload, &y, 1).finite);
}

}  // namespace codec_topk_test
}  // namespace gradwire::codec
