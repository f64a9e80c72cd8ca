// Residuals in bfloat16: how they are rounded, and that codecs see no difference but this.
#include "gradwire/codec/feedback/residuals.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gradwire/base/error.h"
#include "gradwire/codec/feedback/feedback.h"
#include "gradwire/codec/simd/simd.h"

namespace gradwire::codec {
namespace codec_residuals_test {

using Values = std::vector<float>;
using Narrow = std::vector<std::uint16_t>;
using Transaction = ErrorFeedback::Transaction;

Values normal(std::size_t n, unsigned seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> draw;
  Values x(n);
  for (float& each : x) each = draw(random);
  return x;
}

float wide(std::uint16_t narrow) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(narrow) << 16);
}

Narrow rounded(const Values& x, std::uint64_t call = 1, std::uint64_t element = 0) {
  Narrow out(x.size());
  const RandomPosition position{.seed = 7, .call = call, .element = element};
  kernels().bf16_at_random(x.data(), position, reinterpret_cast<std::byte*>(out.data()), x.size());
  return out;
}

// The two values of bfloat16 around x.
std::pair<float, float> neighbours(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x) & 0xFFFF0000U;
  return {std::bit_cast<float>(bits), std::bit_cast<float>(bits + 0x10000U)};
}

TEST(RoundingAtRandom, IsToOneOfBothNeighbours) {
  for (const float scale : {1.0F, 1e30F, 1e-38F, 1e-40F}) {
    Values x = normal(10'000, 1);
    for (float& each : x) each *= scale;
    const Narrow found = rounded(x);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const auto [down, up] = neighbours(x[i]);
      ASSERT_TRUE(wide(found[i]) == down || wide(found[i]) == up) << x[i];
    }
  }
}

TEST(RoundingAtRandom, LeavesWhatIsABfloat16) {
  Narrow all;
  for (std::uint32_t bits = 0; bits < 65536; ++bits)
    if (std::isfinite(wide(static_cast<std::uint16_t>(bits))))
      all.push_back(static_cast<std::uint16_t>(bits));
  Values x;
  for (const std::uint16_t each : all) x.push_back(wide(each));
  EXPECT_EQ(rounded(x), all);
}

TEST(RoundingAtRandom, NeverGivesInfinity) {
  const float most = std::numeric_limits<float>::max();
  for (std::uint64_t call = 0; call < 100; ++call)
    EXPECT_EQ(rounded({most, -most}, call), (Narrow{0x7F7F, 0xFF7F}));
}

// An x that lies k / 16 of the way up is rounded up so often.
TEST(RoundingAtRandom, HasTheMeanOfWhatIsRounded) {
  for (const std::uint32_t sixteenths : {1U, 4U, 8U, 15U})
    for (const std::uint32_t at : {0x3F800000U, 0xC2470000U, 0x00010000U}) {
      const float x = std::bit_cast<float>(at + (sixteenths << 12));
      constexpr std::size_t kDraws = 200'000;
      const Narrow found = rounded(Values(kDraws, x));
      const auto ups = std::ranges::count(found, static_cast<std::uint16_t>((at >> 16) + 1));
      const double p = sixteenths / 16.0, spread = std::sqrt(kDraws * p * (1 - p));
      EXPECT_NEAR(static_cast<double>(ups), p * kDraws, 5 * spread) << x;
    }
}

// The means of one element over calls, too, and no two elements or calls have the same numbers.
TEST(RoundingAtRandom, DrawsAnewForEachElementAndCall) {
  const Values x(4096 * 3, 1 + 0x1p-8F);
  std::vector<int> ups(x.size());
  std::vector<Narrow> seen;
  constexpr int kCalls = 400;
  for (std::uint64_t call = 0; call < kCalls; ++call) {
    const Narrow found = rounded(x, call);
    for (std::size_t i = 0; i < x.size(); ++i) ups[i] += found[i] == 0x3F81 ? 1 : 0;
    if (call < 3)
      for (std::size_t block = 0; block < 3; ++block)
        seen.emplace_back(found.begin() + static_cast<std::ptrdiff_t>(4096 * block),
                          found.begin() + static_cast<std::ptrdiff_t>(4096 * (block + 1)));
  }
  for (const int each : ups) ASSERT_NEAR(each, kCalls / 2, 6 * std::sqrt(kCalls) / 2);
  for (std::size_t i = 0; i < seen.size(); ++i)
    for (std::size_t j = 0; j < i; ++j) EXPECT_NE(seen[i], seen[j]);
}

TEST(RoundingAtRandom, DoesNotDependOnHowARunIsCut) {
  const Values x = normal(20'000, 3);
  for (const std::uint64_t start : {std::uint64_t{0}, (std::uint64_t{1} << 32) - 5000}) {
    const Narrow whole = rounded(x, 1, start);
    std::size_t at = 0;
    for (const std::size_t length : {1, 17, 4078, 4096, 4097, 7711}) {
      const Values part(x.begin() + static_cast<std::ptrdiff_t>(at),
                        x.begin() + static_cast<std::ptrdiff_t>(at + length));
      const Narrow found = rounded(part, 1, start + at);
      ASSERT_TRUE(std::ranges::equal(found, std::span(whole).subspan(at, length))) << length;
      at += length;
    }
    ASSERT_EQ(at, x.size());
  }
}

constexpr const char* kSpecs[] = {"fp16",
                                  "bf16",
                                  "int8",
                                  "int8:rounding=stochastic,seed=7",
                                  "int8:block=65536",
                                  "int4",
                                  "onebit",
                                  "onebit:block=8192",
                                  "threshold:density=0.01",
                                  "threshold:tau=0.5",
                                  "topk:density=0.01",
                                  "topk:density=0.01,values=bf16"};

// What a codec gets and leaves with a narrow residual is what it would with the same one wide.
TEST(NarrowResiduals, CodecsSendTheSameBytesAndLeaveTheSameErrorRounded) {
  const FloatEnvironment environment;
  for (const char* spec : kSpecs)
    for (const std::size_t n : {0, 1, 1000, 16384, 100'001}) {
      const auto codec = make_codec(spec);
      const Values x = normal(n, 1);
      const Narrow e = rounded(normal(n, 2));
      for (const bool first : {true, false}) {
        Values same(n), error(n);
        std::ranges::transform(e, same.begin(), wide);
        Narrow kept(n);
        CodecState one, other;
        EncodeContext context{
            .call = 5, .element = 65536, .error = error.data(), .codec_state = &one};
        EncodeContext narrow{.call = 5, .element = 65536, .codec_state = &other};
        narrow.narrow_error = kept.data();
        if (!first) {
          context.residual = same.data();
          narrow.narrow_residual = e.data();
        }
        codec->prepare(x.data(), n, context);
        codec->prepare(x.data(), n, narrow);
        EXPECT_EQ(one.tau, other.tau) << spec;
        std::vector<std::byte> bytes(codec->max_bytes(n)), found(bytes.size());
        bytes.resize(codec->encode(x.data(), n, context, bytes));
        found.resize(encode(*codec, x.data(), n, narrow, found));
        EXPECT_EQ(found, bytes) << spec << " n=" << n;
        EXPECT_EQ(other.filter, one.filter) << spec;
        EXPECT_EQ(other.sent, one.sent) << spec;
        EXPECT_EQ(other.largest, one.largest) << spec;
        Narrow expected(n);
        EncodeContext keeps{.call = 5, .element = 65536};
        keeps.narrow_error = expected.data();
        keep(keeps, error.data(), n);
        EXPECT_EQ(kept, expected) << spec << " n=" << n;
      }
    }
}

TEST(NarrowResiduals, WhatIsNeverEncodedDeliversThem) {
  const FloatEnvironment environment;
  const Narrow e = rounded(normal(1000, 2));
  Narrow kept(e.size(), 9);
  Values x = normal(e.size(), 1), expected = x;
  for (std::size_t i = 0; i < x.size(); ++i) expected[i] += wide(e[i]);
  EncodeContext context;
  context.narrow_residual = e.data();
  context.narrow_error = kept.data();
  deliver(context, x.data(), x.size());
  EXPECT_EQ(x, expected);
  EXPECT_EQ(kept, Narrow(e.size()));
}

constexpr auto kBFloat16 = ResidualType::kBFloat16;
const float kBetween = 1 + 0x1p-8F;  // half way from one to its neighbour

void book(Transaction& transaction, const Values& values) {
  keep(transaction.context(0), values.data(), values.size());
}

double mean(const Values& values) {
  double sum = 0;
  for (const float each : values) sum += each;
  return sum / static_cast<double>(values.size());
}

constexpr std::size_t kMany = 200'000;
// Six standard deviations of a mean over kMany draws that are up or down by half of 2^-7.
constexpr double kTolerance = 6 * 0x1p-8 / 447;

void expect_rounded(const Values& values, double to) {
  EXPECT_NEAR(mean(values), to, kTolerance * to);
  const auto distinct = [&] {
    Values all = values;
    std::ranges::sort(all);
    return std::unique(all.begin(), all.end()) - all.begin();
  };
  EXPECT_EQ(distinct(), 2);
}

TEST(NarrowFeedback, KeepsWhatACallLeavesWithItsMean) {
  ErrorFeedback feedback(kBFloat16);
  Transaction transaction(feedback, {{"w", kMany}});
  book(transaction, Values(kMany, kBetween));
  EXPECT_TRUE(feedback.residual("w").empty());
  transaction.settle(true);
  expect_rounded(feedback.residual("w"), kBetween);
}

TEST(NarrowFeedback, ARolledBackCallLeavesTheResidual) {
  ErrorFeedback feedback(kBFloat16);
  feedback.add("w", normal(1000, 1));
  const Values before = feedback.residual("w");
  for (const bool settles : {true, false}) {
    Transaction transaction(feedback, {{"w", 1000}});
    EXPECT_EQ(transaction.residual(0), before);
    book(transaction, normal(1000, 2));
    if (settles) transaction.settle(false);
  }
  EXPECT_EQ(feedback.residual("w"), before);
  feedback.begin_step();
  {
    Transaction transaction(feedback, {{"w", 1000}});
    book(transaction, normal(1000, 3));
    transaction.settle(true);
  }
  EXPECT_EQ(feedback.residual("w"), before);
  feedback.end_step(/*keep=*/false);
  EXPECT_EQ(feedback.residual("w"), before);
}

TEST(NarrowFeedback, AddingAndScalingKeepTheMean) {
  ErrorFeedback feedback(kBFloat16);
  feedback.add("w", Values(kMany, kBetween));
  expect_rounded(feedback.residual("w"), kBetween);
  feedback.clear();
  feedback.add("w", Values(kMany, 1));
  feedback.add("w", Values(kMany, 0x1p-8F));
  expect_rounded(feedback.residual("w"), kBetween);
  feedback.clear();
  feedback.add("w", Values(kMany, 1));
  feedback.scale(kBetween);
  expect_rounded(feedback.residual("w"), kBetween);
}

// Each change of a residual between two calls draws numbers of its own: else what was rounded up
// would be rounded up again, and the mean would drift.
TEST(NarrowFeedback, ManyChangesDoNotDrift) {
  ErrorFeedback feedback(kBFloat16);
  feedback.add("w", Values(kMany, 1));
  double expected = 1;
  for (int change = 0; change < 40; ++change) {
    feedback.scale(0.99);
    expected *= 0.99;
  }
  EXPECT_NEAR(mean(feedback.residual("w")), expected, 7 * kTolerance);
  for (int change = 0; change < 40; ++change) {
    feedback.add("w", Values(kMany, 0x1p-10F));
    expected += 0x1p-10;
  }
  EXPECT_NEAR(mean(feedback.residual("w")), expected, 9 * kTolerance);
}

// What is less than half a step of bfloat16 adds up: to nearest it would be lost, call after call.
TEST(NarrowFeedback, SmallAdditionsAddUp) {
  ErrorFeedback feedback(kBFloat16);
  feedback.add("w", Values(kMany, 1));
  for (int call = 0; call < 200; ++call) {
    Transaction transaction(feedback, {{"w", kMany}});
    Values v = transaction.residual(0);
    for (float& each : v) each += 0x1p-11F;
    book(transaction, v);
    transaction.settle(true);
  }
  EXPECT_NEAR(mean(feedback.residual("w")), 1 + 200 * 0x1p-11, 15 * kTolerance);
}

TEST(NarrowFeedback, GoesOnFromWhatWasSavedWithTheSameBits) {
  ErrorFeedback one(kBFloat16), other(kBFloat16);
  one.add("w", normal(5000, 1));
  const auto call = [](ErrorFeedback& of, unsigned seed) {
    Transaction transaction(of, {{"w", 5000}});
    book(transaction, normal(5000, seed));
    transaction.settle(true);
  };
  call(one, 2);
  other.load(one.save());
  EXPECT_EQ(other.residual("w"), one.residual("w"));
  for (ErrorFeedback* each : {&one, &other}) {
    each->scale(0.3);
    call(*each, 3);
    each->scale(0.7);
  }
  EXPECT_EQ(other.residual("w"), one.residual("w"));
}

TEST(NarrowFeedback, LoadsWhatFloat32SavedAndTheOtherWayRound) {
  ErrorFeedback narrow(kBFloat16), whole;
  whole.add("w", Values(kMany, kBetween));
  narrow.load(whole.save());
  expect_rounded(narrow.residual("w"), kBetween);
  ErrorFeedback back;
  back.load(narrow.save());
  EXPECT_EQ(back.residual("w"), narrow.residual("w"));
}

TEST(NarrowFeedback, RefusesWhatIsNotFinite) {
  ErrorFeedback feedback(kBFloat16);
  feedback.add("w", Values(5000, 1e38F));
  const Values before = feedback.residual("w");
  EXPECT_THROW(feedback.add("w", Values(5000, 3e38F)), InvalidArgument);
  EXPECT_THROW(feedback.scale(10), InvalidArgument);
  EXPECT_THROW(feedback.add("w", Values(4999)), InvalidArgument);
  EXPECT_EQ(feedback.residual("w"), before);
}

TEST(NarrowFeedback, MaskLeavesTheValuesOfWhichSomethingWaits) {
  ErrorFeedback feedback(kBFloat16);
  feedback.add("w", Values{0, -0.0F, 3, 0x1p-20F});
  Values values{1, std::numeric_limits<float>::infinity(), 3, 4};
  feedback.mask("w", values);
  EXPECT_EQ(values, (Values{0, 0, 3, 4}));
}

}  // namespace codec_residuals_test
}  // namespace gradwire::codec
