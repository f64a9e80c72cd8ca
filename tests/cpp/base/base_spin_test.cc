#include "gradwire/base/spin.h"

#include <gtest/gtest.h>

namespace gradwire {
namespace base_spin_test {

constexpr unsigned kMost = 100;

void wait(Backoff& backoff, std::chrono::microseconds time) {
  backoff.sleeps();
  const auto over = std::chrono::steady_clock::now() + time;
  while (std::chrono::steady_clock::now() < over) pause_spinning();
  backoff.sleeps();  // for the same thing
  backoff.moved();
}

TEST(Backoff, LongWaitsLeaveNothingAndAShortOneBringsAllBack) {
  Backoff backoff;
  for (unsigned left = kMost; left > 0; left /= 2) {
    EXPECT_EQ(backoff.spins(kMost), left);
    backoff.moved();  // without sleep
    wait(backoff, std::chrono::microseconds(200));
  }
  EXPECT_EQ(backoff.spins(kMost), 0U);
  EXPECT_EQ(backoff.yields(kMost), 0U);
  EXPECT_EQ(backoff.yields(/*most_spins=*/0), kYields);
  // Other processes may make a short wait a long one.
  for (int i = 0; i < 1000 && backoff.spins(kMost) == 0; ++i)
    wait(backoff, std::chrono::microseconds(0));
  EXPECT_EQ(backoff.spins(kMost), kMost);
  EXPECT_EQ(backoff.yields(kMost), kYields);
}

}  // namespace base_spin_test
}  // namespace gradwire
