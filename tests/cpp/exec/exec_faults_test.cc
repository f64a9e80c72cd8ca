// The floor: nothing hangs, and every rank names the same culprit.
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <optional>

#include "exec_ranks.h"
#include "gradwire/base/error.h"
#include "own_time.h"

namespace gradwire::exec {
namespace exec_faults_test {

Request all_reduce(std::span<const Array> arrays, std::string_view algorithm, double timeout) {
  Request r;
  r.algorithm = algorithm;
  r.inputs = r.outputs = arrays;
  r.timeout = timeout;
  return r;
}

void reduce_vector(Communicator& comm, std::size_t n, std::string_view algorithm = "ring",
                   double timeout = 30) {
  std::vector<float> x(n, 1);
  const Array arrays[] = {array_of(x)};
  comm.run(all_reduce(arrays, algorithm, timeout));
}

template <typename E>
const E* as(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const E& e) {
    return &e;  // kept alive by `error`
  } catch (...) {
  }
  return nullptr;
}

class Faults : public testing::TestWithParam<const char*> {};

constexpr std::string_view kSchedules[] = {
    "ring",        "recursive_doubling",       "halving_doubling",
    "binary_tree", "double_binary_tree",       "star",
    "direct",      "hierarchical(ring,direct)"};

void broadcast(Communicator& comm) {
  std::vector<float> x(1);
  const Array arrays[] = {array_of(x)};
  Request request;
  request.collective = Collective::kBroadcast;
  request.outputs = arrays;
  if (comm.identity().rank == 0) request.inputs = arrays;
  comm.run(request);
}

// What a rank sent before it failed counts, as where a program aborts after its last call. A call
// also begins with a look at the control sockets, every 0.1 s, so only a quick rank can tell.
TEST_P(Faults, ALaterFailureEndsNoCallWhoseDataIsThere) {
  constexpr int kCalls = 16;  // as many as may be unread
  bool was_quick = false;
  for (int attempt = 0; attempt < 100 && !was_quick; ++attempt) {
    Ranks ranks(2, GetParam());
    const Deadline slow = Deadline::after(0.08);
    ranks.run([](Communicator& comm) { reduce_vector(comm, 1); });
    const Deadline checks = Deadline::after(0.03);
    for (int i = 0; i < kCalls; ++i) broadcast(ranks[0]);
    ranks[0].abort("enough");
    while (!checks.passed()) std::this_thread::yield();
    std::exception_ptr thrown;
    try {
      for (int i = 0; i < kCalls; ++i) broadcast(ranks[1]);
    } catch (...) {
      thrown = std::current_exception();
    }
    was_quick = !slow.passed();
    EXPECT_FALSE(was_quick && thrown != nullptr);
  }
  EXPECT_TRUE(was_quick);
}

TEST_P(Faults, AVanishedRankIsNamedByAllSurvivors) {
  for (std::string_view algorithm : kSchedules) {
    Ranks ranks(4, GetParam(), {}, {{0, 1}, {2, 3}}, /*mortal=*/true);
    const auto errors = ranks.outcomes([&](Communicator& comm) {
      if (comm.identity().rank == 2) return ranks.vanish(2);
      reduce_vector(comm, 1000000, algorithm);
    });
    for (Rank r : {0, 1, 3}) {
      const auto* error = as<TransportError>(errors[static_cast<std::size_t>(r)]);
      ASSERT_NE(error, nullptr) << algorithm << " rank " << r;
      EXPECT_EQ(error->peer(), 2) << algorithm << ": " << error->what();
    }
  }
}

TEST_P(Faults, ALateRankIsATimeoutThatNamesItOnAllOthers) {
  for (std::string_view algorithm : {"ring", "double_binary_tree", "star"}) {
    Ranks ranks(4, GetParam());
    std::atomic<int> gave_up{0};
    const auto errors = ranks.outcomes([&](Communicator& comm) {
      if (comm.identity().rank == 1) {
        while (gave_up < 3) std::this_thread::yield();
        return;
      }
      try {
        reduce_vector(comm, 1000, algorithm, 0.2);
      } catch (...) {
        ++gave_up;
        throw;
      }
    });
    for (std::size_t r : {0U, 2U, 3U}) {
      const auto* error = as<Timeout>(errors[r]);
      ASSERT_NE(error, nullptr) << algorithm << " rank " << r;
      EXPECT_EQ(error->peer(), 1) << algorithm << ": " << error->what();
      EXPECT_NE(std::string(error->what()).find("all_reduce(float32[1000]"), std::string::npos);
    }
  }
}

TEST_P(Faults, ALateMessageIsBlamedOnTheEndOfTheChain) {
  Ranks ranks(3, GetParam());
  std::byte memory[2] = {};
  const auto errors = ranks.outcomes([&](Communicator& comm) {
    const int rank = comm.identity().rank;
    if (rank == 2) return;
    const auto work = comm.receive(&memory[rank], 1, rank + 1, rank == 0 ? 0.5 : 30);
    comm.wait(*work, 30);
  });
  for (std::size_t r : {0U, 1U}) {
    const auto* error = as<Timeout>(errors[r]);
    ASSERT_NE(error, nullptr);
    EXPECT_EQ(error->peer(), 2) << error->what();
  }
}

TEST_P(Faults, AbortFromAnotherThreadWakesEveryRank) {
  Ranks ranks(3, GetParam());
  std::atomic<int> waiting{0};
  std::thread aborter([&] {
    while (waiting < 2) std::this_thread::yield();
    ranks[0].abort("the user said so");
  });
  const auto errors = ranks.outcomes([&](Communicator& comm) {
    if (comm.identity().rank == 2) return;  // never comes
    ++waiting;
    reduce_vector(comm, 1000, "direct");
  });
  aborter.join();
  for (std::size_t r : {0U, 1U}) {
    const auto* error = as<Aborted>(errors[r]);
    ASSERT_NE(error, nullptr);
    EXPECT_STREQ(error->what(), "the user said so");
  }
}

TEST_P(Faults, DifferentCallsAreInvalidOnEveryRank) {
  Ranks ranks(3, GetParam());
  const auto errors = ranks.outcomes([](Communicator& comm) {
    reduce_vector(comm, comm.identity().rank == 1 ? 100 : 101, "direct");
  });
  for (const auto& error : errors) ASSERT_NE(as<InvalidArgument>(error), nullptr);
}

TEST_P(Faults, AFailedCommunicatorIsDeadWithTheSameError) {
  Ranks ranks(2, GetParam());
  ranks[0].abort("enough");
  EXPECT_THROW(reduce_vector(ranks[0], 1), Aborted);
  EXPECT_THROW(reduce_vector(ranks[1], 1), Aborted);
  EXPECT_THROW(reduce_vector(ranks[1], 1), Aborted);
  EXPECT_TRUE(ranks[1].closed());
}

TEST_P(Faults, ARankThatClosedInPeaceIsNamedByWhoStillWaits) {
  Ranks ranks(2, GetParam());
  ranks.run([](Communicator& comm) { reduce_vector(comm, 100); });
  ranks[1].close(5);
  try {
    reduce_vector(ranks[0], 100);
    FAIL();
  } catch (const TransportError& error) {
    EXPECT_EQ(error.peer(), 1);
    EXPECT_NE(std::string(error.what())
                  .find("closed its communicator, or ended its program, after 1 call,"),
              std::string::npos)
        << error.what();
  }
}

TEST_P(Faults, CloseFinishesWhatWasSubmitted) {
  Ranks ranks(4, GetParam());
  ranks.run([](Communicator& comm) {
    std::vector<std::vector<float>> xs(5, std::vector<float>(50000, 1));
    for (auto& x : xs) {
      const Array arrays[] = {array_of(x)};
      comm.submit(all_reduce(arrays, "ring", 30));
    }
    comm.close(30);
    for (auto& x : xs) EXPECT_EQ(x, std::vector<float>(50000, 4));
  });
}

TEST_P(Faults, CloseThrowsWhatEndedTheWorkThatItFinishes) {
  Ranks ranks(3, GetParam(), {}, {}, /*mortal=*/true);
  std::vector<float> xs[2] = {std::vector<float>(100, 1), std::vector<float>(100, 1)};
  std::atomic<bool> closing[2] = {false, false};  // an earlier failure is the work's to tell
  const auto errors = ranks.outcomes([&](Communicator& comm) {
    const int rank = comm.identity().rank;
    if (rank == 2) {
      while (!closing[0] || !closing[1]) std::this_thread::yield();
      return ranks.vanish(2);
    }
    const Array arrays[] = {array_of(xs[rank])};
    comm.submit(all_reduce(arrays, "ring", 30));
    comm.close(30, [&] { closing[rank] = true; });
  });
  for (std::size_t r : {0U, 1U}) {
    const auto* error = as<TransportError>(errors[r]);
    ASSERT_NE(error, nullptr);
    EXPECT_EQ(error->peer(), 2);
  }
}

TEST_P(Faults, CloseAfterAFailureIsQuiet) {
  Ranks ranks(2, GetParam());
  ranks[0].abort("enough");
  EXPECT_THROW(reduce_vector(ranks[1], 1), Aborted);
  EXPECT_NO_THROW(ranks[1].close(5));
  EXPECT_NO_THROW(ranks[0].close(5));
}

TEST_P(Faults, WaitGivesUpWithoutEndingTheOperation) {
  Ranks ranks(2, GetParam());
  std::vector<float> x(100, 1);
  const Array arrays[] = {array_of(x)};
  const auto work = ranks[0].submit(all_reduce(arrays, "ring", 30));
  EXPECT_THROW(ranks[0].wait(*work, 0.05), Timeout);
  reduce_vector(ranks[1], 100);
  ranks[0].wait(*work, 30);
  EXPECT_EQ(x[99], 2);
}

TEST_P(Faults, InterruptEndsABlockedCall) {
  Ranks ranks(2, GetParam());
  std::vector<float> x(100, 1);
  const Array arrays[] = {array_of(x)};
  struct Stop {};
  EXPECT_THROW(ranks[0].run(all_reduce(arrays, "ring", 30), [] { throw Stop(); }), Stop);
  EXPECT_THROW(reduce_vector(ranks[1], 100), Aborted);
}

// Ranks 0 and 1 disagree, and whoever finds it first asks rank 2, which does not answer.
std::vector<std::exception_ptr> disagree(
    Ranks& ranks, const std::function<void(Rank)>& interrupt,
    const std::function<void(Rank)>& raises = [](Rank) {}) {
  return ranks.outcomes([&](Communicator& comm) {
    const Rank rank = comm.identity().rank;
    if (rank == 2) return;
    std::vector<float> x(rank == 0 ? 100 : 101, 1);
    const Array arrays[] = {array_of(x)};
    try {
      comm.run(all_reduce(arrays, "direct", 30), [&] { interrupt(rank); });
    } catch (...) {
      raises(rank);
      throw;
    }
  });
}

TEST_P(Faults, AbortEndsAnInquiry) {
  Ranks ranks(3, GetParam(), {}, {}, /*mortal=*/true);
  std::atomic<Rank> asker = kNoPeer;
  std::optional<OwnTime> aborted;
  double seconds = 0;
  std::thread aborter([&] {
    while ((asker = ranks.who_asks(2)) == kNoPeer) std::this_thread::yield();
    aborted.emplace();
    ranks[asker].abort("enough");
  });
  const auto errors = disagree(
      ranks, [](Rank) {},
      [&](Rank rank) {
        if (rank == asker && aborted) seconds = aborted->seconds();
      });
  aborter.join();
  EXPECT_LT(seconds, 0.4);
  const auto* error = as<Aborted>(errors.at(static_cast<std::size_t>(asker.load())));
  ASSERT_NE(error, nullptr);
  EXPECT_STREQ(error->what(), "enough");
}

TEST_P(Faults, InterruptEndsAnInquiry) {
  Ranks ranks(3, GetParam(), {}, {}, /*mortal=*/true);
  struct Stop {};
  std::atomic<Rank> stopped{kNoPeer};
  const auto errors = disagree(ranks, [&](Rank rank) {
    if (ranks.who_asks(2) != rank) return;
    stopped = rank;
    throw Stop();
  });
  ASSERT_NE(stopped, kNoPeer);
  EXPECT_THROW(std::rethrow_exception(errors[static_cast<std::size_t>(stopped)]), Stop);
}

INSTANTIATE_TEST_SUITE_P(Transports, Faults, testing::Values("inproc", "shm", "tcp"));

}  // namespace exec_faults_test
}  // namespace gradwire::exec
