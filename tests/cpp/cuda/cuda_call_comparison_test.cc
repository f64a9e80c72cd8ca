// Ranks compare their calls in few rounds, and find the same culprits as a comparison of each call.
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "exec/exec_ranks.h"
#include "gradwire/base/error.h"
#include "gradwire/cuda/call_comparison.h"

namespace gradwire::cuda_call_comparison_test {
namespace {

using cuda::CallComparison;

// Compares this rank's calls until all are known to be alike.
void finish(CallComparison& comparison) {
  while (!comparison.is_over()) {
    comparison.advance(/*at_once=*/true);
    if (const auto pending = comparison.pending()) pending->wait_for(10);
  }
}

std::string text_of(int call) { return "call " + std::to_string(call); }

std::string what(const std::exception_ptr& thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

template <typename Kind>
bool is(const std::exception_ptr& thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const Kind&) {
    return true;
  } catch (...) {
  }
  return false;
}

class AnyNumberOfRanks : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, AnyNumberOfRanks, testing::Values(1, 2, 3, 4, 5, 8));

TEST_P(AnyNumberOfRanks, TheSameCallsAreAlike) {
  exec::Ranks ranks(GetParam());
  ranks.run([&](exec::Communicator& comm) {
    CallComparison comparison(comm);
    for (int call = 0; call < 200; ++call) {
      comparison.add(text_of(call), 10);
      if (call % (comm.identity().rank + 2) == 0) comparison.advance(/*at_once=*/false);
    }
    finish(comparison);
    EXPECT_EQ(comparison.compared(), 200U);
  });
}

TEST_P(AnyNumberOfRanks, OneDifferentCallAmongManyIsNamed) {
  if (GetParam() == 1) return;
  for (const int wrong : {0, 63, 64, 99}) {
    exec::Ranks ranks(GetParam());
    const auto thrown = ranks.outcomes([&](exec::Communicator& comm) {
      CallComparison comparison(comm);
      const bool is_last = comm.identity().rank == GetParam() - 1;
      for (int call = 0; call < 100; ++call)
        comparison.add(is_last && call == wrong ? "another call" : text_of(call), 10);
      finish(comparison);
    });
    for (const auto& each : thrown) {
      EXPECT_TRUE(is<InvalidArgument>(each));
      EXPECT_NE(what(each).find(text_of(wrong)), std::string::npos) << what(each);
      EXPECT_NE(what(each).find("another call"), std::string::npos) << what(each);
    }
  }
}

TEST_P(AnyNumberOfRanks, ARankThatMakesFewerCallsIsNamed) {
  if (GetParam() == 1) return;
  exec::Ranks ranks(GetParam());
  const auto thrown = ranks.outcomes([&](exec::Communicator& comm) {
    CallComparison comparison(comm);
    const bool is_late = comm.identity().rank == 1;
    for (int call = 0; call < (is_late ? 70 : 71); ++call) comparison.add(text_of(call), 3);
    finish(comparison);
    if (is_late) comm.check_failure(10);
  });
  for (std::size_t rank = 0; rank < thrown.size(); ++rank) {
    if (rank == 1) continue;
    EXPECT_TRUE(is<Timeout>(thrown[rank])) << what(thrown[rank]);
    EXPECT_NE(what(thrown[rank]).find("rank 1"), std::string::npos) << what(thrown[rank]);
  }
  EXPECT_NE(what(thrown[0]).find(text_of(70)), std::string::npos) << what(thrown[0]);
}

// Some ranks ask to stop from some call on, and ranks look after different calls have been
// compared.
TEST_P(AnyNumberOfRanks, AllAreToldToStopAfterTheSameCall) {
  constexpr int kCalls = 40, kAsks = 17, kLater = 6;
  exec::Ranks ranks(GetParam());
  ranks.run([&](exec::Communicator& comm) {
    CallComparison comparison(comm);
    const int asks_at = kAsks + comm.identity().rank * 5;  // rank 0 first
    for (int call = 1; call <= kCalls; ++call) {
      comparison.add(text_of(call), 10, /*asks_to_stop=*/call >= asks_at,
                     /*asks_to_resize=*/call >= asks_at + kLater);
      if (call % 3 != 0) continue;  // the others go on without looking
      finish(comparison);
      EXPECT_TRUE(comparison.all_counted());
      EXPECT_EQ(comparison.stops(), call >= kAsks) << "call " << call;
      EXPECT_EQ(comparison.resizes(), call >= kAsks + kLater) << "call " << call;
    }
  });
}

// The messages of a call's own collective were those to all other ranks.
TEST(CallComparison, SendsAFewMessagesForManyCalls) {
  constexpr int kRanks = 8, kCalls = 1000;
  exec::Ranks ranks(kRanks);
  ranks.run([&](exec::Communicator& comm) {
    CallComparison comparison(comm);
    for (int call = 0; call < kCalls; ++call) comparison.add(text_of(call), 10);
    finish(comparison);
    constexpr std::uint64_t kRounds = 2, kMessages = 3;  // log2(8) each
    EXPECT_EQ(comm.traffic().frames_sent, kRounds * kMessages);
  });
}

TEST(CallComparison, WaitsAnIntervalForMoreCalls) {
  constexpr auto kAMoment = std::chrono::microseconds(1);
  exec::Ranks ranks(2);
  ranks.run([&](exec::Communicator& comm) {
    CallComparison comparison(comm);
    auto now = CallComparison::Clock::now();
    const auto begins = [&](CallComparison::Clock::time_point at) {
      comparison.advance(/*at_once=*/false, at);
      return comparison.pending() != nullptr;
    };
    const auto ends = [&] { comparison.pending()->wait_for(10); };
    comparison.add(text_of(0), 10);
    ASSERT_TRUE(begins(now)) << "the first call waits for nothing";
    ends();
    EXPECT_FALSE(begins(now + CallComparison::kInterval - kAMoment));
    ASSERT_TRUE(begins(now += CallComparison::kInterval));
    ends();
    for (int call = 0; call < static_cast<int>(CallComparison::kManyCalls); ++call)
      comparison.add(text_of(call), 10);
    EXPECT_TRUE(begins(now + kAMoment)) << "many calls do not wait";
    ends();
    finish(comparison);
  });
}

}  // namespace
}  // namespace gradwire::cuda_call_comparison_test
