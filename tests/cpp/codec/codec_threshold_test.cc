// threshold: its definition, and that the adaptive one keeps its density. What it shares with every
// codec is tested in codec_conformance_test.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

#include "codec_payloads.h"
#include "codec_reference.h"
#include "gradwire/base/error.h"
#include "gradwire/codec/codec.h"
#include "gradwire/codec/sparse.h"

namespace gradwire::codec {
namespace codec_threshold_test {

Values gaussian(std::size_t n, double scale, std::mt19937_64& random) {
  std::normal_distribution<float> normal(0, static_cast<float>(scale));
  Values x(n);
  for (float& each : x) each = normal(random);
  return x;
}

std::size_t sent(const Values& y) {
  return static_cast<std::size_t>(
      std::count_if(y.begin(), y.end(), [](float each) { return each != 0; }));
}

TEST(Threshold, SendsTauWithTheSignOfWhatReachesIt) {
  const auto codec = make_codec("threshold:tau=0.5");
  const Values x = {0.5F, -0.5F, 0.4999F, -3, 0, -0.0F, 1e30F, -1e-40F};
  Values error(x.size());
  const Payload payload = encode(*codec, x, {.error = error.data()});
  EXPECT_EQ(decode(*codec, payload, x.size()), (Values{0.5F, -0.5F, 0, -0.5F, 0, 0, 0.5F, 0}));
  EXPECT_EQ(error, (Values{0, 0, 0.4999F, -2.5F, 0, 0, 1e30F, -1e-40F}));
}

TEST(Threshold, NamesKeepTheirNumbers) {
  for (const char* spec : {"threshold", "threshold:tau=0.01", "threshold:density=0.05"})
    EXPECT_EQ(make_codec(spec)->name(), spec);
  EXPECT_EQ(make_codec("threshold:density=0.001")->name(), "threshold");
  for (const char* spec : {"threshold:tau=0", "threshold:tau=-1", "threshold:tau=inf",
                           "threshold:tau=nan", "threshold:density=0", "threshold:density=1.5",
                           "threshold:density=nan", "threshold:tau=1,density=0.1"})
    EXPECT_THROW(make_codec(spec), InvalidArgument) << spec;
}

TEST(Threshold, IsGatheredWhileWhatTheOthersSendIsKnownToBeLittle) {
  EXPECT_TRUE(make_codec("threshold")->gathers(16));
  EXPECT_FALSE(make_codec("threshold:density=0.1")->gathers(3));
  EXPECT_TRUE(make_codec("threshold:tau=1")->gathers(2));
  EXPECT_FALSE(make_codec("threshold:tau=1")->gathers(3));
}

TEST(Threshold, NothingToSendIsOneByteAUnit) {
  const auto codec = make_codec("threshold");
  const Values x(3 * codec->block());
  EXPECT_EQ(encode(*codec, x).size(), 3U);
}

// Golomb-Rice gaps, one sign each, and a few bytes a unit.
TEST(Threshold, BytesFollowTheDensity) {
  std::mt19937_64 random(1);
  const Values x = gaussian(1 << 20, 1, random);
  for (const auto& [density, most_bits] :
       {std::pair(0.001, 15.0), std::pair(0.01, 9.5), std::pair(0.1, 6.0), std::pair(0.5, 3.1)}) {
    const auto codec = make_codec("threshold:density=" + std::to_string(density));
    const Payload payload = encode(*codec, x);
    const double count = static_cast<double>(sent(decode(*codec, payload, x.size())));
    EXPECT_NEAR(count / static_cast<double>(x.size()), density, 0.02 * density);
    EXPECT_LE(8 * static_cast<double>(payload.size()) / count, most_bits) << density;
  }
}

TEST(Threshold, WithoutStateEachUnitSendsItsShare) {
  const auto codec = make_codec("threshold:density=0.01");
  std::mt19937_64 random(2);
  Values x = gaussian(3 * codec->block(), 1, random);
  for (std::size_t i = 0; i < codec->block(); ++i) x[i] *= 1000;
  const Values y = decode(*codec, encode(*codec, x), x.size());
  for (std::size_t u = 0; u < 3; ++u) {
    const auto begin = y.begin() + static_cast<std::ptrdiff_t>(u * codec->block());
    EXPECT_EQ(sent({begin, begin + static_cast<std::ptrdiff_t>(codec->block())}), 328U);
  }
}

TEST(Threshold, FewerThanTheTargetAreSentWithTheLargest) {
  const auto codec = make_codec("threshold:density=0.1");
  Values x(1000);
  x[3] = 2, x[9] = -5, x[500] = 5;
  CodecState codec_state;
  codec->prepare(x.data(), x.size(), {.codec_state = &codec_state});
  EXPECT_EQ(codec_state.tau, 5);
  const Values y = decode(*codec, encode(*codec, x), x.size());
  EXPECT_EQ(y[3], 0);
  EXPECT_EQ(y[9], -5);
  EXPECT_EQ(y[500], 5);
}

TEST(Threshold, TheFirstTauReachesTheDensityOnTheSum) {
  std::mt19937_64 random(3);
  for (const std::size_t n : {1000, 65536, 1 << 20})
    for (const double density : {0.001, 0.01, 0.1, 1.0}) {
      const auto codec = make_codec("threshold:density=" + std::to_string(density));
      const Values x = gaussian(n, 1, random), residual = gaussian(n, 3, random);
      CodecState codec_state;
      const EncodeContext context{.residual = residual.data(), .codec_state = &codec_state};
      codec->prepare(x.data(), n, context);
      encode(*codec, x, context);
      const double target = std::max(1.0, density * static_cast<double>(n));
      const double tolerance = n <= 65536 ? 0 : 0.35 * target;
      EXPECT_NEAR(static_cast<double>(codec_state.sent), target, tolerance + 0.5)
          << n << " " << density;
    }
}

// One rank's calls, with feedback.
class Calls {
 public:
  Calls(const char* spec, std::size_t n) : codec_(make_codec(spec)), residual_(n), n_(n) {}

  Values call(const Values& x) {
    Values error(n_);
    adapted_ = {.tau = adapted_.tau};
    const EncodeContext context{
        .residual = residual_.data(), .error = error.data(), .codec_state = &adapted_};
    codec_->prepare(x.data(), n_, context);
    const Payload payload = encode(*codec_, x, context);
    codec_->adapt(n_, adapted_);
    residual_ = error;
    return decode(*codec_, payload, n_);
  }
  const Values& residual() const { return residual_; }
  const CodecState& codec_state() const { return adapted_; }

 private:
  std::shared_ptr<const Codec> codec_;
  Values residual_;
  CodecState adapted_;
  std::size_t n_;
};

struct Series {
  std::vector<double> ratio, tau;  // of the target, a call

  double mean(std::size_t first, std::size_t last) const {
    return std::accumulate(ratio.begin() + static_cast<std::ptrdiff_t>(first),
                           ratio.begin() + static_cast<std::ptrdiff_t>(last), 0.0) /
           static_cast<double>(last - first);
  }
};

// Gaussian gradients, of a scale that depends on the call.
Series follow(const char* spec, double density, std::size_t n, std::size_t calls,
              const std::function<double(std::size_t)>& scale) {
  Calls rank(spec, n);
  std::mt19937_64 random(7);
  Series series;
  for (std::size_t call = 0; call < calls; ++call) {
    rank.call(gaussian(n, scale(call), random));
    series.ratio.push_back(static_cast<double>(rank.codec_state().sent) /
                           (density * static_cast<double>(n)));
    series.tau.push_back(rank.codec_state().tau);
  }
  return series;
}

TEST(AdaptiveThreshold, SettlesAtItsDensityAndDoesNotSwing) {
  for (const auto& [spec, density, swing] :
       {std::tuple("threshold", 0.001, 2.0), std::tuple("threshold:density=0.01", 0.01, 1.3),
        std::tuple("threshold:density=0.1", 0.1, 1.1)}) {
    const Series series = follow(spec, density, 100'000, 200, [](std::size_t) { return 1; });
    EXPECT_NEAR(series.mean(100, 200), 1, 0.2) << spec;
    for (std::size_t call = 100; call < 200; ++call) {
      EXPECT_LT(series.ratio[call], swing) << spec << " " << call;
      EXPECT_GT(series.ratio[call], 1 / swing) << spec << " " << call;
      EXPECT_NEAR(series.tau[call] / series.tau[call - 1], 1, 0.02) << spec << " " << call;
    }
  }
}

TEST(AdaptiveThreshold, FollowsAScaleThatGrowsAHundredTimes) {
  const Series series = follow("threshold", 0.001, 100'000, 100,
                               [](std::size_t call) { return call < 50 ? 1 : 100; });
  EXPECT_GT(series.ratio[50], 100);
  EXPECT_LT(series.mean(65, 75), 4);
  EXPECT_LT(series.mean(80, 100), 2);
  EXPECT_GT(series.mean(80, 100), 0.5);
}

// What the residual still holds is of the old scale, and goes first.
TEST(AdaptiveThreshold, FollowsAScaleThatShrinksAHundredTimes) {
  const Series series = follow("threshold:density=0.1", 0.1, 100'000, 120,
                               [](std::size_t call) { return call < 50 ? 1 : 0.01; });
  EXPECT_NEAR(series.mean(100, 120), 1, 0.5);
  EXPECT_LT(series.tau[119], series.tau[49] / 50);
}

TEST(AdaptiveThreshold, WithoutAResidualTauFollowsTheDataAtOnce) {
  const auto codec = make_codec("threshold");
  std::mt19937_64 random(8);
  const Values x = gaussian(50'000, 0.01, random);
  CodecState codec_state{.tau = 1};
  encode(*codec, x, {.codec_state = &codec_state});
  EXPECT_EQ(codec_state.sent, 0U);
  codec->adapt(x.size(), codec_state);
  EXPECT_EQ(codec_state.tau, codec_state.largest * 1.25F);
}

TEST(AdaptiveThreshold, ZerosLeaveTauAlone) {
  Calls rank("threshold", 5000);
  std::mt19937_64 random(9);
  for (int call = 0; call < 3; ++call) rank.call(Values(5000));
  EXPECT_EQ(rank.codec_state().tau, 0);
  rank.call(gaussian(5000, 1, random));
  EXPECT_EQ(rank.codec_state().sent, 5U);
  Calls other("threshold", 5000);
  Values x(5000);
  x[7] = 1;
  other.call(x);
  const float tau = other.codec_state().tau;
  EXPECT_GT(tau, 0);
  for (int call = 0; call < 50; ++call) other.call(Values(5000));
  EXPECT_EQ(other.codec_state().tau, tau);
}

// Where fewer elements than the target ever move, tau may not shrink until they are lost.
TEST(AdaptiveThreshold, AFewActiveElementsAreDelivered) {
  constexpr std::size_t kCount = 20'000, kCalls = 1500;
  Calls rank("threshold:density=0.01", kCount);
  Values x(kCount);
  for (std::size_t i = 0; i < 5; ++i) x[1000 * i] = static_cast<float>(i + 1);
  double delivered = 0;
  for (std::size_t call = 0; call < kCalls; ++call) delivered += rank.call(x)[4000];
  EXPECT_GT(delivered, 0.75 * 5 * kCalls);
}

TEST(AdaptiveThreshold, NanMovesNothingToNan) {
  Calls rank("threshold", 1000);
  Values x(1000, 1.0F);
  x[0] = NAN, x[1] = INFINITY;
  rank.call(x);
  EXPECT_TRUE(std::isfinite(rank.codec_state().tau));
  EXPECT_GT(rank.codec_state().tau, 0);
}

TEST(AdaptiveThreshold, AForeignTauIsReplaced) {
  const auto codec = make_codec("threshold");
  const Values x(1000, 0.25F);
  for (const float value : {NAN, INFINITY, -1.0F}) {
    CodecState codec_state{.tau = value};
    codec->prepare(x.data(), x.size(), {.codec_state = &codec_state});
    EXPECT_EQ(codec_state.tau, 0.25F);
  }
}

TEST(AdaptiveThreshold, DeliversEverythingOverManyCalls) {
  constexpr std::size_t kCount = 40'000;
  for (const char* spec : {"threshold", "threshold:tau=0.3"}) {
    Calls rank(spec, kCount);
    std::mt19937_64 random(10);
    std::vector<double> given(kCount), delivered(kCount);
    for (int call = 0; call < 100; ++call) {
      const Values x = gaussian(kCount, call % 2 == 0 ? 1 : 0.1, random);
      const Values y = rank.call(x);
      for (std::size_t i = 0; i < kCount; ++i) given[i] += x[i], delivered[i] += y[i];
    }
    for (std::size_t i = 0; i < kCount; ++i)
      ASSERT_NEAR(delivered[i] + rank.residual()[i], given[i], 1e-3) << spec;
  }
}

TEST(Threshold, AnImpossibleTauIsRefused) {
  const auto codec = make_codec("threshold:tau=1");
  const Payload good = encode(*codec, Values(1, 1.0F));
  ASSERT_EQ(good.size(), 6U);
  for (const float tau : {0.0F, -1.0F, INFINITY, NAN}) {
    Payload payload = good;
    std::memcpy(payload.data() + 1, &tau, 4);
    float y = 0;
    EXPECT_THROW(codec->decode(payload, &y, 1), InvalidArgument);
  }
}

}  // namespace codec_threshold_test
}  // namespace gradwire::codec
