#include "gradwire/base/spin.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <thread>

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

// Runs this thread on its core alone, and so those that it starts.
void stay_here() {
  cpu_set_t here;
  CPU_ZERO(&here);
  CPU_SET(::sched_getcpu(), &here);
  ::sched_setaffinity(0, sizeof here, &here);
}

void yield_beside_a_busy_thread(Backoff& backoff) {
  stay_here();
  std::jthread busy([](const std::stop_token& stop) {
    while (!stop.stop_requested()) pause_spinning();
  });
  for (int i = 0; i < 1000 && backoff.yields(kMost) != 0; ++i) backoff.yield();
}

TEST(Backoff, ItSleepsSoonWhereOthersCompute) {
  Backoff backoff;
  std::thread([&] { yield_beside_a_busy_thread(backoff); }).join();
  EXPECT_EQ(backoff.yields(kMost), 0U);
  EXPECT_EQ(backoff.spins(kMost), kMost / 4);
  EXPECT_EQ(backoff.yields(/*most_spins=*/0), kYields);
}

}  // namespace base_spin_test
}  // namespace gradwire
