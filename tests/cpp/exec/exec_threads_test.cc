// Several threads on one communicator.
#include <gtest/gtest.h>

#include <atomic>

#include "exec_ranks.h"
#include "gradwire/base/error.h"

namespace gradwire::exec {
namespace exec_threads_test {

void all_reduce(Communicator& comm, std::vector<float>& values) {
  const Array arrays[] = {array_of(values)};
  Request request;
  request.inputs = request.outputs = arrays;
  comm.run(request);
}

void copy(Communicator& comm, std::vector<float>& from, std::vector<float>& to) {
  const Array inputs[] = {array_of(from)}, outputs[] = {array_of(to)};
  Request request;
  request.inputs = inputs;
  request.outputs = outputs;
  comm.run(request);
}

// The driver may have looked for the last time when abort() is called.
TEST(Threads, AbortHoldsThoughTheDriverFinishesItsOwnCall) {
  constexpr int kTimes = 100;
  std::vector<float> from(1 << 18, 1.0F), to(1 << 18);
  for (int i = 0; i < kTimes; ++i) {
    Communicator comm(Identity{}, Tuning{});
    std::atomic<bool> begun{false};
    std::thread caller([&] {
      begun = true;
      try {
        copy(comm, from, to);
      } catch (const Aborted&) {  // one or the other
      }
    });
    while (!begun) std::this_thread::yield();
    comm.abort("enough");
    caller.join();
    EXPECT_TRUE(comm.closed());
  }
}

TEST(Threads, BlockingCallsOfTwoTakeTurns) {
  Communicator comm(Identity{}, Tuning{});
  const auto body = [&comm] {
    std::vector<float> values(4, 2.0F);
    for (int i = 0; i < 1000; ++i) all_reduce(comm, values);
    EXPECT_EQ(values, std::vector<float>(4, 2.0F));
  };
  std::thread one(body), other(body);
  one.join();
  other.join();
}

// Lets rank 0 wait so long, and so often, that it would sleep at once in its next wait.
void wait_long(Ranks& ranks) {
  std::vector<float> one(4), other(4);
  for (int i = 0; i < 20; ++i) {
    std::thread early([&] { all_reduce(ranks[0], one); });
    const auto until = Deadline::Clock::now() + std::chrono::milliseconds(1);
    while (Deadline::Clock::now() < until) std::this_thread::yield();
    all_reduce(ranks[1], other);
    early.join();
  }
}

// Whoever begins a call may hold a lock that the other rank needs to come to it.
TEST(Threads, WhoBeginsACallDoesNotSleepInIt) {
  Ranks ranks(2);
  wait_long(ranks);
  std::vector<float> one(4, 1.0F), other(4, 2.0F);
  const Array arrays[][1] = {{array_of(one)}, {array_of(other)}};
  Request requests[2];
  for (int rank = 0; rank < 2; ++rank)
    requests[rank].inputs = requests[rank].outputs = arrays[rank];
  const auto began = Deadline::Clock::now();
  const auto first = ranks[0].begin(requests[0]);
  const std::chrono::duration<double> took = Deadline::Clock::now() - began;
  const auto second = ranks[1].begin(requests[1]);
  ranks[0].wait(*first, 30);
  ranks[1].wait(*second, 30);
  EXPECT_LT(took.count(), 1.0);
  EXPECT_EQ(one, std::vector<float>(4, 3.0F));
}

// Rank 0 waits in close() for a call that rank 1 does not make. Returns how many seconds passed
// until close() of a second thread of rank 0 was over.
double seconds_of_second_close(const std::function<void(Communicator&)>& close) {
  constexpr double kFirstSeconds = 30;
  Ranks ranks(2);
  std::vector<float> values(4, 1.0F);
  const Array arrays[] = {array_of(values)};
  Request request;
  request.inputs = request.outputs = arrays;
  request.timeout = 2 * kFirstSeconds;
  ranks[0].submit(request);
  std::atomic<bool> closing{false};
  std::thread first([&] { ranks[0].close(kFirstSeconds, [&] { closing = true; }); });
  while (!closing) std::this_thread::yield();
  const auto began = Deadline::Clock::now();
  close(ranks[0]);
  const std::chrono::duration<double> took = Deadline::Clock::now() - began;
  first.join();
  EXPECT_TRUE(ranks[0].closed());
  return took.count();
}

TEST(Threads, ASecondCloseTakesNoLongerThanItMay) {
  EXPECT_LT(seconds_of_second_close([](Communicator& comm) { comm.close(0.1); }), 15);
}

TEST(Threads, AnInterruptEndsASecondClose) {
  struct Stop {};
  const auto close = [](Communicator& comm) {
    EXPECT_THROW(comm.close(60, [] { throw Stop(); }), Stop);
  };
  EXPECT_LT(seconds_of_second_close(close), 15);
}

}  // namespace exec_threads_test
}  // namespace gradwire::exec
