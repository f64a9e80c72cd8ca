#include <gtest/gtest.h>

#include "gradwire/base/error.h"
#include "gradwire/schedule/schedule.h"
#include "schedule_catalogue.h"

namespace gradwire::schedule {
namespace schedule_builder_test {

TEST(ScheduleBuilder, RoundsAreCreatedAsTheyAreNamed) {
  Builder b(3, 2);
  EXPECT_EQ(b.rounds(), 0);
  b.copy(2, 0, 1, {0, 2});
  EXPECT_EQ(b.rounds(), 3);
  const Schedule s = std::move(b).build(Collective::kBroadcast, "mine", 2);
  EXPECT_TRUE(s.rounds[0].empty() && s.rounds[1].empty());
  EXPECT_EQ(s.rounds[2], (Round{{0, 1, {0, 2}, Landing::kCopy}}));
  EXPECT_EQ(s.root, 2);
}

TEST(ScheduleBuilder, EdgesOutOfRangeAreRefusedByName) {
  Builder b(3, 2);
  EXPECT_THROW(b.copy(-1, 0, 1, {0, 1}), ScheduleError);
  EXPECT_THROW(b.copy(1 << 16, 0, 1, {0, 1}), ScheduleError);
  EXPECT_THROW(b.copy(0, -1, 1, {0, 1}), ScheduleError);
  EXPECT_THROW(b.reduce(0, 0, 1, {-1, 1}), ScheduleError);
  EXPECT_THROW(b.reduce(0, 0, 1, {0, 3}), ScheduleError);
  EXPECT_THROW(b.reduce(0, 0, 1, {1, 1}), ScheduleError);
  try {
    b.reduce(4, 0, 3, {0, 1});
    FAIL();
  } catch (const ScheduleError& error) {
    EXPECT_STREQ(error.what(), "round 4: edge 0 -> 3: rank 3 is not in 0 .. 2");
  }
  EXPECT_EQ(b.rounds(), 0);
}

TEST(ScheduleBuilder, SizesNamesAndRolesAreChecked) {
  EXPECT_THROW(Builder(0, 1), ScheduleError);
  EXPECT_THROW(Builder(1, 0), ScheduleError);
  for (const char* name : {"", "two words", "a#b", "line\nbreak"})
    EXPECT_THROW(Builder(2, 2).build(Collective::kAllReduce, name), ScheduleError);
  EXPECT_THROW(Builder(2, 2).build(Collective::kAllReduce, std::string(201, 'x')), ScheduleError);
  EXPECT_THROW(Builder(2, 3).build(Collective::kAllGather, "x"), ScheduleError);
  EXPECT_THROW(Builder(2, 2).build(Collective::kAllToAll, "x"), ScheduleError);
  EXPECT_THROW(Builder(2, 1).build(Collective::kReduce, "x", 2), ScheduleError);
  EXPECT_THROW(Builder(2, 1).build(Collective::kAllReduce, "x", 1), ScheduleError);
}

TEST(Rounds, KnowWhatEachRankDoes) {
  const Schedule s = all_reduce_by("direct", 4);
  std::size_t sends = 0;
  std::size_t receives = 0;
  for (Rank r = 0; r < 4; ++r) {
    for (const Edge& edge : sends_of(s.rounds[0], r)) EXPECT_EQ(edge.src, r);
    for (const Edge& edge : receives_of(s.rounds[0], r)) EXPECT_EQ(edge.dst, r);
    sends += sends_of(s.rounds[0], r).size();
    receives += receives_of(s.rounds[0], r).size();
  }
  EXPECT_EQ(sends, s.rounds[0].size());
  EXPECT_EQ(receives, s.rounds[0].size());
  EXPECT_EQ(sends_of(s.rounds[1], 2), (std::vector<Edge>{{2, 3, {2, 3}, Landing::kCopy},
                                                         {2, 0, {2, 3}, Landing::kCopy},
                                                         {2, 1, {2, 3}, Landing::kCopy}}));
}

TEST(Wrap, IsNeverNegative) {
  for (int value = -9; value < 9; ++value) {
    EXPECT_GE(wrap(value, 4), 0);
    EXPECT_LT(wrap(value, 4), 4);
    EXPECT_EQ((wrap(value, 4) - value) % 4, 0);
  }
}

}  // namespace schedule_builder_test
}  // namespace gradwire::schedule
