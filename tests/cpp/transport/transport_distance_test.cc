#include "gradwire/transport/memory/distance.h"

#include <gtest/gtest.h>

namespace gradwire::transport {
namespace transport_distance_test {

constexpr double kNear = 30, kFar = 120;  // nanoseconds

void add(LineTimes& times, int count, double nanoseconds) {
  for (int i = 0; i < count; ++i) times.add(nanoseconds);
}

TEST(LineTimes, SayNearAtFirst) { EXPECT_FALSE(LineTimes().far()); }

TEST(LineTimes, SayFarAfterFewSlowLines) {
  LineTimes times;
  add(times, 8, kFar);
  EXPECT_TRUE(times.far());
}

TEST(LineTimes, FollowAPeerThatMoves) {
  LineTimes times;
  add(times, 100, kFar);
  add(times, 100, kNear);
  EXPECT_FALSE(times.far());
  add(times, 100, kFar);
  EXPECT_TRUE(times.far());
}

TEST(LineTimes, TellWhenTheAnswerChanges) {
  LineTimes times;
  int changes = 0;
  for (int i = 0; i < 100; ++i) changes += times.add(kFar) ? 1 : 0;
  for (int i = 0; i < 100; ++i) changes += times.add(kNear) ? 1 : 0;
  EXPECT_EQ(changes, 2);
}

TEST(LineTimes, StayNearThroughInterrupts) {
  LineTimes times;
  for (int i = 0; i < 1000; ++i) {
    times.add(i % 20 == 0 ? 1e6 : kNear);
    ASSERT_FALSE(times.far()) << i;
  }
}

// Most of them were fetched ahead.
TEST(LineTimes, StayFarThroughFastLines) {
  LineTimes times;
  add(times, 20, kFar);
  for (int i = 0; i < 1000; ++i) {
    times.add(i % 4 == 0 ? kFar : 5);
    ASSERT_TRUE(times.far()) << i;
  }
}

TEST(LineClock, LooksAtALine) {
  const std::byte line{1};
  const LineClock clock;
  if (clock.usable()) {
    EXPECT_GT(clock.first_look(&line), -100);
  }
}

}  // namespace transport_distance_test
}  // namespace gradwire::transport
