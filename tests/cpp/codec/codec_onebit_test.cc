#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "codec_payloads.h"
#include "codec_reference.h"
#include "gradwire/base/error.h"
#include "gradwire/codec/codec.h"

namespace gradwire::codec {
namespace codec_onebit_test {

constexpr float kMost = std::numeric_limits<float>::max();

std::uint32_t bits(float value) { return std::bit_cast<std::uint32_t>(value); }

Values round_trip(const Values& x) {
  const auto codec = make_codec("onebit");
  return decode(*codec, encode(*codec, x), x.size());
}

Values draw(std::size_t n, Data data = Data::kNormal, std::uint64_t seed = 4) {
  std::mt19937_64 random(seed);
  Values x(n);
  for (float& each : x) each = draw_float(data, random);
  return x;
}

std::array<float, 2> means_of(const Payload& payload) {
  std::array<float, 2> means;
  std::memcpy(means.data(), payload.data(), sizeof means);
  return means;
}

float tree_sum(std::array<float, 32> lanes) {
  for (std::size_t w = 16; w > 0; w /= 2)
    for (std::size_t l = 0; l < w; ++l) lanes[l] += lanes[l + w];
  return lanes[0];
}

// The mean of one sign, as onebit.cc defines it.
float mean_by_definition(const Values& x, bool negative, float scale = 1) {
  std::array<float, 32> lanes{};
  std::size_t count = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (std::signbit(x[i]) != negative) continue;
    lanes[i % 32] += x[i] * scale;
    ++count;
  }
  return count == 0 ? 0 : tree_sum(lanes) / static_cast<float>(count);
}

TEST(OneBit, EncodesLikeTheDefinition) {
  const auto codec = make_codec("onebit:block=256");
  for (const Data data : {Data::kNormal, Data::kDenormal})
    for (const std::size_t n : {1, 31, 100, 255, 256}) {
      const Values x = draw(n, data, n);
      const Payload payload = encode(*codec, x);
      ASSERT_EQ(payload.size(), 8 + (n + 7) / 8);
      EXPECT_EQ(bits(means_of(payload)[0]), bits(mean_by_definition(x, false)));
      EXPECT_EQ(bits(means_of(payload)[1]), bits(mean_by_definition(x, true)));
      for (std::size_t i = 0; i < n; ++i)
        ASSERT_EQ((static_cast<unsigned>(payload[8 + i / 8]) >> i % 8) & 1U, std::signbit(x[i]));
    }
}

TEST(OneBit, DecodesToTheMeans) {
  EXPECT_EQ(round_trip({1, -2, 3, -4, 5}), (Values{3, -3, 3, -3, 3}));
  EXPECT_EQ(round_trip({1, 2}), (Values{1.5F, 1.5F}));
  EXPECT_EQ(round_trip({-1, -2}), (Values{-1.5F, -1.5F}));
}

TEST(OneBit, IsBiasedAndOfVariableSize) {
  const auto codec = make_codec("onebit");
  EXPECT_TRUE(codec->biased());
  EXPECT_FALSE(codec->fixed_size());
  EXPECT_EQ(codec->block(), 1024U);
  EXPECT_EQ(codec->max_bytes(1024 + 9), 8U + 256 + 8 + 4);
  EXPECT_TRUE(codec->gathers(2));
  EXPECT_FALSE(codec->gathers(3));
}

TEST(OneBit, AThousandElementsTakeThirtyTimesFewerBytes) {
  const std::size_t size = encode(*make_codec("onebit"), draw(1024)).size();
  EXPECT_EQ(size, 136U);
  EXPECT_GT(4096.0 / static_cast<double>(size), 30.0);
}

// Up to 1/16 zeros are non-negatives like others; beyond, they are left out.
TEST(OneBit, ZerosAreLeftOutBeyondOneInSixteen) {
  const auto codec = make_codec("onebit");
  Values x(1024, 2);
  std::fill_n(x.begin(), 500, -4.0F);
  std::fill_n(x.begin() + 600, 64, 0.0F);
  const Payload few = encode(*codec, x);
  EXPECT_EQ(few.size(), 136U);
  EXPECT_EQ(decode(*codec, few, 1024)[600], 2.0F * 460 / 524);

  x[664] = -0.0F;
  Values error(1024, 9);
  const Payload many = encode(*codec, x, {.error = error.data()});
  EXPECT_EQ(many.size(), 8U + 7 + (1024 - 65 + 7) / 8);  // runs of 0, 600, 65 and 359 elements
  Values expected = x;
  expected[664] = 0;
  const Values y = decode(*codec, many, 1024);
  for (std::size_t i = 0; i < 1024; ++i) ASSERT_EQ(bits(y[i]), bits(expected[i])) << i;
  EXPECT_EQ(error, Values(1024, 0.0F));
}

TEST(OneBit, NegativeZerosDoNotCountAsNegatives) {
  Values x(64, -0.0F);
  x[3] = -8;
  x[40] = -4;
  const Values y = round_trip(x);
  EXPECT_EQ(y[3], -6);
  EXPECT_EQ(y[40], -6);
  for (const std::size_t i : {0, 2, 39, 63}) EXPECT_EQ(bits(y[i]), 0U);
}

TEST(OneBit, OnlyZerosTakeElevenBytes) {
  const auto codec = make_codec("onebit");
  for (const float zero : {0.0F, -0.0F}) {
    const Payload payload = encode(*codec, Values(1024, zero));
    EXPECT_EQ(payload.size(), 8U + 3);
    for (const float each : decode(*codec, payload, 1024)) ASSERT_EQ(bits(each), 0U);
  }
}

// Writes the Elias γ code of each run's length, the first one's plus 1.
Payload runs_by_definition(const Values& x) {
  std::string code;
  const auto add = [&](std::size_t length) {
    const auto digits = static_cast<std::size_t>(std::bit_width(length)) - 1;
    code += std::string(digits, '0') + '1';
    for (std::size_t k = 0; k < digits; ++k) code += (length >> k & 1) != 0 ? '1' : '0';
  };
  std::size_t length = 1;
  for (std::size_t i = 0; i < x.size(); ++i, ++length)
    if ((x[i] != 0) != (i > 0 && x[i - 1] != 0)) {
      add(length);
      length = 0;
    }
  add(length);
  Payload bytes((code.size() + 7) / 8);
  for (std::size_t i = 0; i < code.size(); ++i)
    if (code[i] == '1') bytes[i / 8] |= std::byte{1} << i % 8;
  return bytes;
}

Payload bitmap_by_definition(const Values& x) {
  Payload bytes((x.size() + 7) / 8);
  for (std::size_t i = 0; i < x.size(); ++i)
    if (x[i] != 0) bytes[i / 8] |= std::byte{1} << i % 8;
  return bytes;
}

// Values and zeros in runs of about so many.
Values draw_runs(std::size_t n, std::size_t length, std::uint64_t seed) {
  Values x = draw(n, Data::kNormal, seed);
  std::mt19937_64 random(seed);
  bool zero = random() % 2 == 0;
  for (float& each : x) {
    if (random() % length == 0) zero = !zero;
    if (zero) each = 0;
  }
  return x;
}

TEST(OneBit, AMaskIsOfRunsWhereThatTakesFewerBytes) {
  const auto codec = make_codec("onebit:block=8192");
  std::size_t of_runs = 0, of_bits = 0;
  for (const std::size_t n : {1, 5, 8, 9, 63, 64, 65, 100, 1000, 1024, 4099, 8192})
    for (const std::size_t length : {1, 2, 3, 4, 5, 6, 7, 8, 30, 500, 9000})
      for (std::uint64_t seed = 0; seed < 5; ++seed) {
        const Values x = draw_runs(n, length, seed);
        const auto zeros = static_cast<std::size_t>(std::count(x.begin(), x.end(), 0.0F));
        if (16 * zeros <= n) continue;
        const Payload runs = runs_by_definition(x), bitmap = bitmap_by_definition(x);
        const bool has_runs = runs.size() < bitmap.size();
        const Payload& mask = has_runs ? runs : bitmap;
        ++(has_runs ? of_runs : of_bits);
        const Payload payload = encode(*codec, x);
        ASSERT_EQ(payload.size(), 8 + mask.size() + (n - zeros + 7) / 8);
        ASSERT_TRUE(std::equal(mask.begin(), mask.end(), payload.begin() + 8)) << n;
        ASSERT_TRUE(std::signbit(means_of(payload)[0]));
        ASSERT_NE(std::signbit(means_of(payload)[1]), has_runs);
        const Values y = decode(*codec, payload, n);
        for (std::size_t i = 0; i < n; ++i) ASSERT_EQ(y[i] != 0, x[i] != 0) << n << " " << i;
      }
  EXPECT_GT(of_runs, 100U);
  EXPECT_GT(of_bits, 100U);
}

// A block with a mask of such runs, and signs of all elements there are.
Payload with_runs(const Payload& runs, std::size_t signs) {
  Payload payload(8 + runs.size() + (signs + 7) / 8);
  payload[3] = std::byte{0x80};
  std::copy(runs.begin(), runs.end(), payload.begin() + 8);
  return payload;
}

TEST(OneBit, RunsOfOtherLengthsThanTheBlockAreRefused) {
  const auto codec = make_codec("onebit");
  Values x(64, 0.0F), y(64);
  x[40] = 1;
  const Payload runs = runs_by_definition(x);
  EXPECT_EQ(codec->decode(with_runs(runs, 1), y.data(), 64).finite, true);
  for (const std::size_t n : {39, 63, 65, 128})
    EXPECT_THROW(codec->decode(with_runs(runs, 64), y.data(), n), InvalidArgument) << n;
}

TEST(OneBit, RunsThatDoNotEndAreRefused) {
  const auto codec = make_codec("onebit");
  Values y(1024);
  Payload endless(127, std::byte{0});
  EXPECT_THROW(codec->decode(with_runs(endless, 1024), y.data(), 1024), InvalidArgument);
  endless[1] = std::byte{0x80};  // 2^15 elements, or more
  EXPECT_THROW(codec->decode(with_runs(endless, 1024), y.data(), 1024), InvalidArgument);
  EXPECT_THROW(codec->decode(with_runs({}, 0), y.data(), 1024), InvalidArgument);
  Values x(1024, 0.0F);
  x[900] = 1;
  Payload cut = runs_by_definition(x);
  cut.pop_back();
  EXPECT_THROW(codec->decode(with_runs(cut, 0), y.data(), 1024), InvalidArgument);
}

TEST(OneBit, RunsAsLongAsTheMaskAreRefused) {
  Values y(16);
  // 16 runs of 1 element, the first of none: 17 codes, 3 + 16 bits in the second case.
  const Payload runs{std::byte{0xFF}, std::byte{0xFF}, std::byte{0x01}};
  EXPECT_THROW(make_codec("onebit")->decode(with_runs(runs, 16), y.data(), 16), InvalidArgument);
}

TEST(OneBit, SumsOfHugeValuesDoNotOverflow) {
  EXPECT_EQ(round_trip(Values(1024, kMost)), Values(1024, kMost));
  Values x(1024, kMost);
  std::fill_n(x.begin(), 512, -kMost);
  EXPECT_EQ(round_trip(x), x);
  x = draw(1024, Data::kHuge);
  const auto means = means_of(encode(*make_codec("onebit"), x));
  EXPECT_EQ(means[0], mean_by_definition(x, false, 0x1p-24F) / 0x1p-24F);
  EXPECT_EQ(means[1], mean_by_definition(x, true, 0x1p-24F) / 0x1p-24F);
}

TEST(OneBit, HugeValuesAmongZerosDoNotOverflow) {
  Values x(1024, 0.0F);
  for (std::size_t i = 0; i < 1024; i += 2) x[i] = kMost;
  EXPECT_EQ(round_trip(x), x);
}

TEST(OneBit, ABadBlockIsNanAndLeavesTheOthers) {
  for (const float poison : {NAN, -NAN, INFINITY, -INFINITY}) {
    Values x = draw(3 * 1024);
    x[1500] = poison;
    const Values y = round_trip(x);
    for (std::size_t i = 0; i < y.size(); ++i) ASSERT_EQ(std::isnan(y[i]), i / 1024 == 1) << i;
  }
}

TEST(OneBit, ABadBlockIsNanAmongZeros) {
  Values x(1024, 0.0F);
  x[700] = -INFINITY;
  for (const float each : round_trip(x)) ASSERT_TRUE(std::isnan(each));
}

TEST(OneBit, PayloadsAreSummedInGroupsOfFour) {
  const auto codec = make_codec("onebit");
  constexpr std::size_t n = 2000;
  for (const std::size_t count : {1, 3, 4, 6, 8, 11, 67, 130}) {
    std::vector<Payload> payloads;
    Values expected(n);
    for (std::size_t p = 0; p < count; p += 4) {
      Values group(n);
      for (std::size_t k = p; k < std::min(p + 4, count); ++k) {
        Values x = draw(n, Data::kNormal, k + 1);
        if (k % 3 == 1) std::fill_n(x.begin() + 100, 700, 0.0F);
        payloads.push_back(encode(*codec, x));
        const Values y = decode(*codec, payloads.back(), n);
        for (std::size_t i = 0; i < n; ++i) group[i] = k == p ? y[i] : group[i] + y[i];
      }
      for (std::size_t i = 0; i < n; ++i) expected[i] = p == 0 ? group[i] : expected[i] + group[i];
    }
    Values y(n, 7);
    const std::vector<ConstBytes> views(payloads.begin(), payloads.end());
    EXPECT_TRUE(codec->decode_sum(views, y.data(), n).finite);
    EXPECT_EQ(y, expected) << count;
  }
}

TEST(OneBit, BitsOfAMaskBeyondTheEndAreIgnored) {
  const auto codec = make_codec("onebit");
  Values x(13, 3.0F);
  for (const std::size_t i : {0, 2, 4, 6, 8, 10}) x[i] = 0;
  Payload payload = encode(*codec, x);
  ASSERT_EQ(payload.size(), 8U + 2 + 1);
  payload[9] |= std::byte{0xE0};
  EXPECT_EQ(decode(*codec, payload, 13), x);
}

TEST(OneBit, AMaskThatPromisesMoreThanFollowsIsRefused) {
  const auto codec = make_codec("onebit");
  Values x(1024, 0.0F), y(1024);
  for (std::size_t i = 0; i < 1024; i += 2) x[i] = 3;
  Payload payload = encode(*codec, x);
  ASSERT_EQ(payload.size(), 8U + 128 + 64);
  std::fill(payload.begin() + 8, payload.begin() + 136, std::byte{0xFF});
  EXPECT_THROW(codec->decode(payload, y.data(), 1024), InvalidArgument);
}

TEST(OneBit, ParametersAreCheckedAndNamesCanonical) {
  EXPECT_EQ(make_codec("onebit:block=1024")->name(), "onebit");
  EXPECT_EQ(make_codec("onebit:block=64")->name(), "onebit:block=64");
  for (const char* spec : {"onebit:block=100", "onebit:block=0", "onebit:block=8224",
                           "onebit:block=nan", "onebit:rounding=nearest"})
    EXPECT_THROW(make_codec(spec), InvalidArgument) << spec;
}

}  // namespace codec_onebit_test
}  // namespace gradwire::codec
