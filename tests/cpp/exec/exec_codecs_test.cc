// Every codec on every schedule, number of ranks and length: all ranks end with the same bits,
// whatever the timing, the segments and the transport.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "exec_feedback_job.h"
#include "gradwire/schedule/generators.h"

namespace gradwire::exec {
namespace exec_codecs_test {

// Lengths of runs: none, one, odd tails, about a unit, several of them.
std::vector<std::size_t> lengths(const codec::Codec& codec, int ranks) {
  const std::size_t unit = codec.block(), others = static_cast<std::size_t>(ranks) - 1;
  if (unit > 4096 && ranks != 3) return {0, 1, others, 1000};  // large units: once, and below
  return {0, 1, others, 1000, unit - 1, unit + 1, 3 * unit + 77};
}

std::vector<std::string> schedules(std::string_view codec) {
  const auto combine = codec::make_codec(codec)->combine();
  std::vector<std::string> all = {"auto"};
  if (combine == codec::Combine::kPlain || combine == codec::Combine::kReencode)
    for (std::string_view each : schedule::algorithms(Collective::kAllReduce))
      if (combine == codec::Combine::kPlain || each != "recursive_doubling") all.emplace_back(each);
  if (combine == codec::Combine::kReencode) all.emplace_back("hierarchical(ring,direct)");
  if (combine != codec::Combine::kCompound) all.insert(all.end(), {"gather", "gather(ring)"});
  return all;
}

std::vector<Values> all_inputs(int ranks, int call, std::size_t n) {
  std::vector<Values> x;
  for (int r = 0; r < ranks; ++r) x.push_back(inputs(r, call, n));
  return x;
}

class Codecs : public testing::TestWithParam<std::string_view> {};

TEST_P(Codecs, RanksEndWithTheSameBitsAndNothingIsLost) {
  const std::string codec(GetParam());
  for (int ranks = 1; ranks <= kMostRanks; ++ranks)
    for (std::size_t n : lengths(*codec::make_codec(codec), ranks)) {
      Job job(ranks, {{"w", n}}, {any_transport(ranks)});
      std::vector<double> balance(n);
      int call = 0;
      for (const std::string& algorithm : schedules(codec)) {
        const Case how{codec, algorithm};
        const auto x = all_inputs(ranks, call++, n);
        const auto y = job.all_reduce(how, x);
        expect_same_bits(y, how);
        for (const Values& each : x)
          for (std::size_t i = 0; i < n; ++i) balance[i] += each[i];
        for (std::size_t i = 0; i < n; ++i) balance[i] -= y[0][i];
      }
      const auto kept = job.residuals();
      for (std::size_t i = 0; i < n; ++i)
        ASSERT_NEAR(balance[i], kept[i], call * ranks * 8 * 0x1p-20)
            << codec << " p=" << ranks << " n=" << n << " element " << i;
    }
}

// Arrays of several units, also for codecs of large units, and one element less or more.
TEST_P(Codecs, LargeArraysAgreeAndNothingIsLost) {
  const std::string codec(GetParam());
  const std::size_t unit = std::max<std::size_t>(2, codec::make_codec(codec)->block());
  const std::vector<std::string> all = schedules(codec);
  std::size_t turn = codec.size();  // not the same one for each codec
  for (int ranks : {2, 3, 5})
    for (std::size_t n : {unit - 1, unit + 1, std::size_t{200003}}) {
      const Case how{codec, all[++turn % all.size()]};
      SCOPED_TRACE(codec + " " + how.algorithm + " n=" + std::to_string(n));
      Job job(ranks, {{"w", n}}, {any_transport(static_cast<int>(turn))});
      const auto x = all_inputs(ranks, 0, n), y = job.all_reduce(how, x);
      expect_same_bits(y, how);
      const auto kept = job.residuals();
      for (std::size_t i = 0; i < n; ++i) {
        double given = 0;
        for (const Values& each : x) given += each[i];
        ASSERT_NEAR(y[0][i] + kept[i], given, ranks * 8 * 0x1p-20) << "element " << i;
      }
    }
}

struct Family {
  const char* name;
  float (*value)(std::size_t i, float normal);
  double tolerance;  // of the balance; 0: it is not looked at
};

constexpr Family kFamilies[] = {
    {"zero", [](std::size_t, float) { return 0.0F; }, 0x1p-149},
    {"signed zeros", [](std::size_t i, float) { return i % 3 == 0 ? -0.0F : 0.0F; }, 0x1p-149},
    {"denormal", [](std::size_t, float normal) { return normal * 0x1p-140F; }, 0x1p-147},
    {"constant", [](std::size_t, float) { return -0.3F; }, 0x1p-18},
    {"huge", [](std::size_t, float normal) { return normal * 0x1p122F; }, 0},
    {"two of five are zero", [](std::size_t i, float normal) { return i % 5 < 2 ? 0.0F : normal; },
     0x1p-16},
};

// Whatever is zero on all ranks stays zero, in results and in residuals.
void expect_zeros(const std::vector<Values>& x, const Values& y, const Values& residual) {
  for (std::size_t i = 0; i < y.size(); ++i) {
    const bool untouched = x[0][i] == 0 && x[1][i] == 0 && x[2][i] == 0;
    ASSERT_TRUE(!untouched || (y[i] == 0 && residual[i] == 0)) << "element " << i;
  }
}

TEST_P(Codecs, DegenerateBlocksStayAsTheyAre) {
  constexpr std::size_t kCount = 2500;
  const std::string codec(GetParam());
  for (const std::string& algorithm : schedules(codec))
    for (const Family& family : kFamilies) {
      SCOPED_TRACE(codec + " " + algorithm + ": " + family.name);
      Job job(3, {{"w", kCount}});
      std::vector<double> balance(kCount);
      for (int call = 0; call < 3; ++call) {
        std::vector<Values> x = all_inputs(3, call, kCount);
        for (Values& each : x)
          for (std::size_t i = 0; i < kCount; ++i)
            each[i] = family.value(i, std::clamp(each[i], -2.0F, 2.0F));
        const auto y = job.all_reduce({codec, algorithm}, x);
        expect_same_bits(y, {codec, algorithm});
        expect_zeros(x, y[0], job.feedback[static_cast<std::size_t>(call)]->residual("w"));
        for (std::size_t i = 0; i < kCount; ++i) {
          ASSERT_TRUE(std::isfinite(y[0][i])) << "element " << i;
          balance[i] += double{x[0][i]} + x[1][i] + x[2][i] - y[0][i];
        }
      }
      const auto kept = job.residuals();
      for (std::size_t i = 0; family.tolerance > 0 && i < kCount; ++i)
        ASSERT_NEAR(balance[i], kept[i], family.tolerance) << "element " << i;
    }
}

TEST_P(Codecs, NeitherTimingNorSegmentsNorTransportChangeABit) {
  const std::string codec(GetParam());
  const std::size_t n = 3 * codec::make_codec(codec)->block() + 4321;
  const bool one_size = n > 20000 || kMostRanks < 9;  // of slow ones, and under sanitizers
  for (int ranks : one_size ? std::vector{3} : std::vector{2, 3, 4})
    for (const std::string& algorithm : schedules(codec)) {
      std::vector<Values> expected;
      std::vector<std::uint64_t> frames;
      for (const Travel& travel :
           {Travel{}, Travel{"inproc", 1 << 20, true}, Travel{"inproc", 300, true},
            Travel{"shm", 5000, true}, Travel{"tcp", 40000, false}}) {
        Job job(ranks, {{"w", n}, {"b", 10}}, travel);
        std::vector<Values> found;
        for (int call = 0; call < 2; ++call)
          found = job.all_reduce({codec, algorithm}, all_inputs(ranks, call, n + 10));
        frames.push_back(job.ranks[0].traffic().frames_sent);
        for (const auto& each : job.feedback) found.push_back(each->residual("w"));
        if (expected.empty()) expected = found;
        for (std::size_t i = 0; i < found.size(); ++i)
          ASSERT_TRUE(same_bits(found[i], expected[i]))
              << codec << " " << algorithm << " p=" << ranks << " " << travel.transport << " "
              << travel.segment_bytes;
      }
      const bool is_cut = frames[2] >= 3 * frames[1];
      EXPECT_TRUE(is_cut || algorithm != "ring" || !codec::make_codec(codec)->fixed_size())
          << codec << ": not cut into segments";
    }
}

// One that is not finite, and two of other signs, whose sum has the same bits on all ranks too.
TEST_P(Codecs, NanAndInfMoveNoResidualOnAnySchedule) {
  constexpr std::size_t kCount = 1500, kOne = 700, kTwo = 701;
  const std::string codec(GetParam());
  for (int ranks : {2, 5}) {
    Job job(ranks, {{"w", kCount}});
    int call = 0;
    for (const std::string& algorithm : schedules(codec))
      for (float bad : {NAN, -INFINITY}) {
        const Case how{codec, algorithm};
        SCOPED_TRACE(codec + " " + algorithm + " p=" + std::to_string(ranks));
        auto x = all_inputs(ranks, call++, kCount);
        job.all_reduce(how, x);
        const std::vector<Values> before = job.residuals_of("w");
        Values& some = x[static_cast<std::size_t>(call % ranks)];
        some[kOne] = some[kTwo] = bad;
        x[static_cast<std::size_t>((call + 1) % ranks)][kTwo] = -bad;
        const auto y = job.all_reduce(how, x);
        expect_same_bits(y, how);
        EXPECT_FALSE(std::isfinite(y[0][kOne]));
        EXPECT_TRUE(std::isnan(y[0][kTwo]));
        EXPECT_EQ(job.residuals_of("w"), before);
      }
  }
}

// Jobs of different numbers of ranks, one after the other, that go on from each other's residuals.
// Where a rank has left, another takes over its own.
struct Generations {
  static constexpr std::size_t kCount = 2000;

  std::vector<std::shared_ptr<ErrorFeedback>> feedback = {};
  std::vector<double> balance = std::vector<double>(kCount);
  int calls = 0;

  void run(int ranks, const std::vector<Case>& cases) {
    Job job(ranks, {{"w", kCount}});
    job.shapes = {{40, 50}};
    for (; feedback.size() > job.feedback.size(); feedback.pop_back())
      feedback.front()->add("w", feedback.back()->residual("w"));
    std::copy(feedback.begin(), feedback.end(), job.feedback.begin());
    feedback = job.feedback;
    for (const Case& how : cases) call(job, how);
    const auto kept = job.residuals();
    for (std::size_t i = 0; i < kCount; ++i)
      ASSERT_NEAR(balance[i], kept[i], calls * 20 * 0x1p-20) << "p=" << ranks << " element " << i;
  }

  void call(Job& job, const Case& how) {
    const auto x = all_inputs(job.ranks.size(), calls++, kCount);
    const auto y = job.all_reduce(how, x);
    expect_same_bits(y, how);
    for (const Values& each : x)
      for (std::size_t i = 0; i < kCount; ++i) balance[i] += each[i];
    for (std::size_t i = 0; i < kCount; ++i) balance[i] -= y[0][i];
  }
};

TEST_P(Codecs, NothingIsLostWhenRanksLeaveAndCome) {
  const std::string codec(GetParam());
  std::vector<Case> all;
  for (const std::string& algorithm : schedules(codec)) all.push_back({codec, algorithm});
  Generations generations;
  for (int ranks : {4, 3, 1, 2, 5}) generations.run(ranks, all);
}

TEST(MixedCodecs, NothingIsLostWhenCodecScheduleAndRanksChange) {
  std::vector<Case> all = cases();
  all.push_back({"lowrank:rank=2", "auto"});
  all.push_back({"lowrank:rank=3", "ring"});
  Generations generations;
  std::size_t turn = 0;
  for (int ranks : {4, 3, 1, 2, 5}) {
    std::vector<Case> some;
    while (some.size() * 5 < all.size()) some.push_back(all[turn++ * 7 % all.size()]);
    generations.run(ranks, some);
  }
}

// More than are ever gathered by auto.
TEST(MixedCodecs, AutoServesManyRanks) {
  if (kMostRanks < 9) GTEST_SKIP() << "too many threads for a sanitizer";
  std::vector<Case> all;
  for (std::string_view codec : codec::codec_names()) all.push_back({std::string(codec), "auto"});
  Generations generations;
  for (int ranks : {17, 20}) generations.run(ranks, all);
}

std::vector<std::string_view> uncompounded() {
  std::vector<std::string_view> all;
  for (std::string_view each : codec::codec_names())
    if (codec::make_codec(each)->combine() != codec::Combine::kCompound) all.push_back(each);
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, Codecs, testing::ValuesIn(uncompounded()),
                         [](const auto& each) { return std::string(each.param); });

}  // namespace exec_codecs_test
}  // namespace gradwire::exec
