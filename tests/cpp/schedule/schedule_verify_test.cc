#include "gradwire/schedule/verify.h"

#include <gtest/gtest.h>

#include <functional>

#include "gradwire/base/error.h"
#include "schedule_catalogue.h"

namespace gradwire::schedule {
namespace schedule_verify_test {

constexpr ChunkRange kAll{0, 1};

Schedule all_reduce_of(Builder builder) {
  return std::move(builder).build(Collective::kAllReduce, "by_hand");
}

bool says(const Report& report, const std::string& sentence) {
  return std::find(report.problems.begin(), report.problems.end(), sentence) !=
         report.problems.end();
}

// Rank 1 sums, rank 0 learns: the smallest good schedule of two ranks with an owner.
Builder good_pair() {
  Builder b(2, 1);
  b.reduce(0, 0, 1, kAll);
  b.copy(1, 1, 0, kAll);
  return b;
}

TEST(Verify, SendsReadTheBufferAsItWasWhenTheRoundBegan) {
  Builder swap(2, 1);
  swap.reduce(0, 0, 1, kAll);
  swap.reduce(0, 1, 0, kAll);
  const Report report = verify(all_reduce_of(std::move(swap)));
  EXPECT_TRUE(report.ok()) << problems_of(report);
  EXPECT_FALSE(report.in_tree);
}

TEST(Verify, ContributionCountedTwice) {
  Builder b = good_pair();
  b.reduce(2, 1, 0, kAll);
  const Report report = verify(all_reduce_of(std::move(b)));
  EXPECT_FALSE(report.correct);
  EXPECT_TRUE(report.complete);
  EXPECT_FALSE(report.ok());
  EXPECT_TRUE(says(report,
                   "round 2: rank 0 reduces chunk 0 from rank 1 a second time (contribution of "
                   "rank 0 counted twice)"))
      << problems_of(report);
}

TEST(Verify, WhatIsOverwrittenByTheResultDoesNotCount) {
  Builder b(3, 1);
  b.reduce(0, 1, 0, kAll);
  b.reduce(0, 2, 0, kAll);
  b.reduce(1, 0, 1, kAll);  // rank 0's finished sum onto what rank 1 has already given
  b.copy(2, 0, 1, kAll);
  b.copy(2, 0, 2, kAll);
  const Report report = verify(all_reduce_of(std::move(b)));
  EXPECT_TRUE(report.ok()) << problems_of(report);
  EXPECT_FALSE(report.in_tree);
}

TEST(Verify, ContributionMissing) {
  Builder b(3, 2);
  b.reduce(0, 0, 1, {0, 2});
  b.reduce(0, 2, 1, {1, 2});
  b.copy(1, 1, 0, {0, 2});
  b.copy(1, 1, 2, {0, 2});
  const Report report = verify(all_reduce_of(std::move(b)));
  EXPECT_FALSE(report.complete);
  EXPECT_FALSE(report.correct);
  EXPECT_TRUE(says(report, "at the end rank 0 lacks what rank 2 contributed to chunk 0"))
      << problems_of(report);
}

TEST(Verify, ResultMissing) {
  Builder b(3, 3);
  b.copy(0, 0, 2, {0, 1});
  const Schedule s = std::move(b).build(Collective::kGather, "by_hand", 2);
  const Report report = verify(s);
  EXPECT_FALSE(report.complete);
  EXPECT_TRUE(says(report, "at the end rank 2 holds nothing of chunk 1")) << problems_of(report);
  EXPECT_EQ(report.problems.size(), 1u);
}

TEST(Verify, NobodySendsWhatItDoesNotHold) {
  Builder b(3, 1);
  b.copy(0, 1, 2, kAll);
  b.copy(1, 0, 1, kAll);
  b.copy(1, 0, 2, kAll);
  const Report report = verify(std::move(b).build(Collective::kBroadcast, "by_hand"));
  EXPECT_FALSE(report.correct);
  EXPECT_TRUE(report.complete);
  EXPECT_TRUE(
      says(report, "round 0: rank 2 copies chunk 0 from rank 1, but rank 1 holds nothing of it"))
      << problems_of(report);
}

TEST(Verify, CopyLandsAlone) {
  const std::function<void(Builder&)> seconds[] = {
      [](Builder& b) { b.copy(1, 1, 0, kAll); },
      [](Builder& b) { b.reduce(1, 2, 0, kAll); },
  };
  for (const auto& second : seconds) {
    Builder b(3, 1);
    b.reduce(0, 0, 1, kAll);
    b.reduce(0, 2, 1, kAll);
    b.copy(1, 1, 0, kAll);
    second(b);
    b.copy(2, 1, 0, kAll);  // even where all comes right in the end
    b.copy(2, 1, 2, kAll);
    const Report report = verify(all_reduce_of(std::move(b)));
    EXPECT_FALSE(report.correct);
    ASSERT_EQ(report.problems.size(), 1u) << problems_of(report);
    EXPECT_NE(report.problems[0].find("a copy must land alone"), std::string::npos);
  }
}

TEST(Verify, CopyAfterReductionInOneRoundCollidesToo) {
  Builder b(3, 1);
  b.reduce(0, 0, 1, kAll);
  b.copy(0, 2, 1, kAll);
  EXPECT_FALSE(verify(all_reduce_of(std::move(b))).correct);
}

TEST(Verify, RankThatWaitsForItselfIsADeadlock) {
  Builder b = good_pair();
  b.copy(1, 1, 1, kAll);
  const Report report = verify(all_reduce_of(std::move(b)));
  EXPECT_FALSE(report.deadlock_free);
  EXPECT_TRUE(report.correct);
  EXPECT_FALSE(report.ok());
  EXPECT_TRUE(says(report, "round 1: rank 1 sends chunk 0 to itself")) << problems_of(report);
}

// (0+1)+2 at ranks 0 and 1, (2+0)+1 at rank 2.
TEST(Verify, DifferentAdditionsDoNotAgree) {
  Builder b(3, 1);
  for (Rank dst = 0; dst < 3; ++dst)
    for (Rank src = 0; src < 3; ++src)
      if (src != dst) b.reduce(0, src, dst, kAll);
  const Report report = verify(all_reduce_of(std::move(b)));
  EXPECT_TRUE(report.correct);
  EXPECT_TRUE(report.complete);
  EXPECT_FALSE(report.agreement);
  EXPECT_TRUE(says(report,
                   "at the end ranks 0 and 2 hold chunk 0 by different additions, so their bits "
                   "may differ"))
      << problems_of(report);
}

TEST(Verify, CopyOfAPartialSumIsNotInATree) {
  Builder b(3, 1);
  b.reduce(0, 2, 1, kAll);
  b.copy(1, 1, 2, kAll);
  b.reduce(1, 1, 0, kAll);
  b.copy(2, 0, 1, kAll);
  b.copy(2, 0, 2, kAll);
  const Report report = verify(all_reduce_of(std::move(b)));
  EXPECT_TRUE(report.ok()) << problems_of(report);
  EXPECT_FALSE(report.in_tree);
}

TEST(Verify, OnlyReducingCollectivesReduce) {
  Builder b(2, 1);
  b.reduce(0, 0, 1, kAll);
  const Report report = verify(std::move(b).build(Collective::kBroadcast, "by_hand"));
  EXPECT_FALSE(report.correct);
  EXPECT_TRUE(says(report,
                   "round 0: rank 1 reduces chunk 0 from rank 0, but broadcast only moves data: "
                   "use copy"))
      << problems_of(report);
}

TEST(Verify, MalformedSchedulesAreReportedNotFollowed) {
  const Schedule good = all_reduce_of(good_pair());
  std::vector<Schedule> bad(8, good);
  bad[0].rounds[0][0].dst = 7;
  bad[1].rounds[0][0].src = -1;
  bad[2].rounds[1][0].chunks = {0, 2};
  bad[3].rounds[1][0].chunks = {0, 0};
  bad[4].ranks = 0;
  bad[5].chunks = -1;
  bad[6].root = 1;
  bad[7].collective = Collective::kAllToAll;
  for (const Schedule& schedule : bad) {
    const Report report = verify(schedule);
    EXPECT_FALSE(report.ok() || report.correct || report.in_tree);
    EXPECT_EQ(report.problems.size(), 1u);
  }
  EXPECT_TRUE(says(verify(bad[0]), "round 0: edge 0 -> 7: rank 7 is not in 0 .. 1"));
}

TEST(Verify, ProblemsAreFewHoweverMuchIsWrong) {
  const Report report = verify(Builder(64, 64).build(Collective::kAllGather, "empty"));
  EXPECT_FALSE(report.complete);
  EXPECT_EQ(report.problems.size(), 16u);
}

TEST(Verify, RequireValidThrowsWithTheProblems) {
  EXPECT_NO_THROW(require_valid(all_reduce_of(good_pair())));
  Builder b(2, 1);
  b.reduce(0, 0, 1, kAll);
  try {
    require_valid(all_reduce_of(std::move(b)));
    FAIL();
  } catch (const ScheduleError& error) {
    EXPECT_NE(
        std::string(error.what())
            .find("'by_hand' is not a valid all_reduce over 2 ranks: at the end rank 0 lacks what "
                  "rank 1 contributed to chunk 0"),
        std::string::npos)
        << error.what();
  }
}

// Two heaps, the second shifted by a rank: every contribution counts once, and rank 1 or 2 is
// inside both trees.
TEST(Verify, ShapeShowsTheNaiveDoubleTree) {
  constexpr int p = 6;
  Builder b(p, 2);
  for (int i = 1; i < p; ++i)
    for (int chunk = 0; chunk < 2; ++chunk) {
      const Rank child = wrap(i + chunk, p);
      const Rank parent = wrap((i - 1) / 2 + chunk, p);
      const int depth = i < 3 ? 1 : 2;
      b.reduce(2 - depth, child, parent, {chunk, chunk + 1});
      b.copy(1 + depth, parent, child, {chunk, chunk + 1});
    }
  const Report report = verify(all_reduce_of(std::move(b)));
  EXPECT_TRUE(report.ok()) << problems_of(report);
  EXPECT_TRUE(report.in_tree);
  EXPECT_EQ(report.shape.rounds, 4);
  EXPECT_DOUBLE_EQ(report.shape.max_sent, 2.5);
  EXPECT_DOUBLE_EQ(verify(all_reduce_by("double_binary_tree", p)).shape.max_sent, 2.0);
}

// Calls mutate(schedule, round, position) on a copy for each edge of each good schedule.
void for_each_mutant(const std::function<bool(Round&, std::size_t)>& mutate,
                     const std::function<void(const Report&, const std::string&)>& check) {
  std::size_t mutants = 0;
  for (const Recipe& recipe : all_recipes(9)) {
    const Schedule good = generate(recipe);
    for (std::size_t round = 0; round < good.rounds.size(); ++round)
      for (std::size_t i = 0; i < good.rounds[round].size(); ++i) {
        Schedule mutant = good;
        if (!mutate(mutant.rounds[round], i)) continue;
        ++mutants;
        check(verify(mutant),
              label(recipe) + " round " + std::to_string(round) + " edge " + std::to_string(i));
      }
  }
  EXPECT_GT(mutants, 1000u);
}

void expect_caught(const std::function<bool(Round&, std::size_t)>& mutate) {
  for_each_mutant(mutate, [](const Report& report, const std::string& where) {
    EXPECT_FALSE(report.ok()) << where;
    EXPECT_FALSE(report.in_tree) << where;
    EXPECT_FALSE(report.problems.empty()) << where;
  });
}

TEST(VerifyMutants, DroppedEdge) {
  expect_caught([](Round& round, std::size_t i) {
    round.erase(round.begin() + static_cast<std::ptrdiff_t>(i));
    return true;
  });
}

TEST(VerifyMutants, DuplicatedEdge) {
  expect_caught([](Round& round, std::size_t i) {
    round.push_back(Edge(round[i]));
    return true;
  });
}

TEST(VerifyMutants, CopyForReduceAndReduceForCopy) {
  expect_caught([](Round& round, std::size_t i) {
    const bool copy = round[i].landing == Landing::kCopy;
    round[i].landing = copy ? Landing::kReduce : Landing::kCopy;
    return true;
  });
}

// A redirected reduction may still reach the root by another way; a redirected copy leaves its
// receiver without.
TEST(VerifyMutants, RedirectedCopy) {
  expect_caught([](Round& round, std::size_t i) {
    Edge& edge = round[i];
    const Rank other = edge.dst == 0 ? 1 : 0;
    if (edge.landing != Landing::kCopy || other == edge.src) return false;
    edge.dst = other;
    return true;
  });
}

TEST(VerifyMutants, EdgeToItself) {
  expect_caught([](Round& round, std::size_t i) {
    round[i].dst = round[i].src;
    return true;
  });
}

TEST(Verify, EdgesOfOneMessageStandTogether) {
  Builder builder(3, 2);
  builder.reduce(0, 1, 0, {0, 1});
  builder.reduce(0, 2, 0, {0, 2});
  builder.reduce(0, 1, 0, {1, 2});
  builder.copy(1, 0, 1, {0, 2});
  builder.copy(1, 0, 2, {0, 2});
  const Report report = verify(std::move(builder).build(Collective::kAllReduce, "interleaved"));
  EXPECT_FALSE(report.agreement);
  ASSERT_FALSE(report.problems.empty());
  EXPECT_NE(report.problems[0].find("round 0: the edges 1 -> 0"), std::string::npos);
}

}  // namespace schedule_verify_test
}  // namespace gradwire::schedule
