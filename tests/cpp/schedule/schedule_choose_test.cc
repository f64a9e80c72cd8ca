#include <gtest/gtest.h>

#include <random>

#include "gradwire/schedule/cost.h"
#include "schedule_catalogue.h"
#include "schedule_costs.h"

namespace gradwire::schedule {
namespace schedule_choose_test {

Choice of(const CostModel& model, Collective collective, int ranks, double bytes) {
  Question question;
  question.collective = collective;
  question.ranks = ranks;
  question.bytes = bytes;
  return choose(model, question);
}

TEST(Choose, ByDefaultIsWhatExperienceSays) {
  const CostModel model = default_model(kMemory, kTcp, 64);
  for (int p : {2, 3, 4, 8, 16}) {
    EXPECT_EQ(of(model, Collective::kAllReduce, p, 64 << 20).algorithm, "direct") << p;
    EXPECT_EQ(of(model, Collective::kAllGather, p, 64 << 20).algorithm, "direct") << p;
    EXPECT_EQ(of(model, Collective::kReduceScatter, p, 64 << 20).algorithm, "direct") << p;
  }
  for (int p : {3, 4})
    EXPECT_EQ(of(model, Collective::kAllReduce, p, 4).algorithm, "gather(direct)");
  for (int p : {8, 16, 64})
    EXPECT_EQ(of(model, Collective::kAllReduce, p, 4).algorithm, "recursive_doubling") << p;
  EXPECT_EQ(of(model, Collective::kBroadcast, 4, 4).algorithm, "star");
}

TEST(Choose, IsTheBestOfTheCatalogue) {
  std::mt19937 random(3);
  for (int p : {2, 3, 5, 8})
    for (double bytes : {4.0, 65536.0, 4194304.0}) {
      const CostModel model = random_model(random);
      const Choice best = of(model, Collective::kAllReduce, p, bytes);
      for (std::string_view name : algorithms(Collective::kAllReduce)) {
        if (name == "star" && p > 2 && bytes > 16384) continue;  // the model is wrong about it
        const Schedule schedule = all_reduce_by(name, p);
        EXPECT_LE(best.seconds, seconds(schedule, model, bytes, 32) / 0.989)
            << name;  // one that is clearly slower
      }
    }
}

TEST(Choose, WantsNoMoreOfASlowLinkThanMustCrossIt) {
  CostModel model = default_model(kEmulated, kTcp, 8);
  for (int p : {2, 4, 8}) {
    const double bytes = 64 << 20, least = 2 * (p - 1.0) / p * bytes * model.within.beta;
    const double found = of(model, Collective::kAllReduce, p, bytes).seconds;
    EXPECT_GE(found, least);
    EXPECT_LE(found, 1.05 * least) << p;
  }
}

TEST(Choose, TakesTheFewestSwitchesForSmallSumsOfRanksThatShareCores) {
  const CostModel model = default_model(kMemory, kTcp, 2);
  for (int p : {3, 4})
    EXPECT_EQ(of(model, Collective::kAllReduce, p, 4).algorithm, "gather(direct)") << p;
  for (int p : {6, 8, 16, 17})
    EXPECT_EQ(of(model, Collective::kAllReduce, p, 4).algorithm, "star") << p;
  EXPECT_NE(of(model, Collective::kAllReduce, 8, 32 << 10).algorithm, "star");
}

TEST(Choose, TakesNoStarBetweenHosts) {
  Question question{.ranks = 8, .bytes = 4};
  for (Rank r = 0; r < 8; r += 4) question.hosts.push_back({r, r + 1, r + 2, r + 3});
  EXPECT_NE(choose(default_model(kMemory, kTcp, 2), question).algorithm, "star");
}

TEST(Choose, TakesAnInTreeScheduleForALossyCodec) {
  const CostModel model = default_model(kMemory, kTcp, 64);
  Question question;
  question.ranks = 8;
  question.bytes = 64;
  question.codec = model.codec("int8");
  question.ratio = 0.25;
  const Choice choice = choose(model, question);
  EXPECT_TRUE(verify(all_reduce_by(choice.algorithm, 8)).in_tree);
}

TEST(Choose, KeepsMostBytesWithinTheHosts) {
  CostModel model = default_model(kMemory, kTcp, 64);
  Question question;
  question.ranks = 16;
  question.bytes = 64 << 20;
  for (Rank r = 0; r < 16; r += 4) question.hosts.push_back({r, r + 1, r + 2, r + 3});
  EXPECT_TRUE(choose(model, question).algorithm.starts_with("hierarchical(direct,"));
  EXPECT_LE(choose(model, question).segment_bytes, question.most_message);
}

// Eight hosts, the even ones at one site and the odd ones at another.
Question at_two_sites(double bytes) {
  Question question{.ranks = 8, .bytes = bytes};
  question.sites = {{{0, 2, 4, 6}, {1, 3, 5, 7}}, 0.03, 1 / 25e6};
  for (Rank r = 0; r < 8; ++r) question.hosts.push_back({r});
  return question;
}

TEST(Choose, SendsEachElementBetweenSitesOnce) {
  const CostModel model = default_model(kMemory, kTcp, 8);
  const Choice choice = choose(model, at_two_sites(64 << 20));
  EXPECT_TRUE(choice.algorithm.starts_with("hierarchical(direct,")) << choice.algorithm;
  const double least = (64 << 20) / 25e6 + 0.03;
  EXPECT_GE(choice.seconds, 0.99 * least);
  EXPECT_LE(choice.seconds, 1.1 * least);
}

TEST(Choose, WaitsForALongWayAsSeldomAsItCan) {
  const CostModel model = default_model(kMemory, kTcp, 8);
  EXPECT_LE(choose(model, at_two_sites(1000)).seconds, 0.031);
}

TEST(Choose, TakesSitesAlsoWithACodec) {
  const CostModel model = default_model(kMemory, kTcp, 8);
  for (const bool between : {false, true}) {
    Question question = at_two_sites(64 << 20);
    question.codec = model.codec("int8");
    question.ratio = 0.25;
    question.between_sites = between;
    const Choice choice = choose(model, question);
    EXPECT_TRUE(choice.algorithm.starts_with("hierarchical(")) << choice.algorithm;
    EXPECT_LE(choice.seconds, 1.2 * ((16 << 20) / 25e6 + 0.06));
  }
}

TEST(Choose, HasSomethingForOneRankAndForNothing) {
  const CostModel model = default_model(kMemory, kTcp, 2);
  for (int c = 0; c < kCollectives; ++c) {
    const auto collective = static_cast<Collective>(c);
    for (int p : {1, 2, 5})
      for (double bytes : {0.0, 1e6}) {
        const Choice choice = of(model, collective, p, bytes);
        const bool gathers = choice.algorithm == "gather(direct)";
        EXPECT_NO_THROW(gathers ? generate(recipe_of(Collective::kAllGather, "direct", p))
                                : generate(recipe_of(collective, choice.algorithm, p)));
      }
  }
}

}  // namespace schedule_choose_test
}  // namespace gradwire::schedule
