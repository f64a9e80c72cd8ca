// Communicators of one process: a failure of one ends the others, and who waits in one answers in
// the others.
#include "gradwire/exec/control/family.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "exec_ranks.h"
#include "gradwire/base/error.h"

namespace gradwire::exec {
namespace exec_family_test {

void reduce(Communicator& comm, double timeout = 30, std::size_t n = 10) {
  std::vector<float> x(n, 1);
  const Array arrays[] = {array_of(x)};
  Request r;
  r.algorithm = "ring";
  r.inputs = r.outputs = arrays;
  r.timeout = timeout;
  comm.run(r);
}

// Times out in less than a second, long enough for others to say whom they wait for.
void expect_timeout(Communicator& comm, Rank peer, Rank job_peer) {
  try {
    reduce(comm, 0.6);
    ADD_FAILURE() << "it works";
  } catch (const Timeout& error) {
    EXPECT_EQ(error.peer(), peer) << error.what();
    EXPECT_EQ(error.job_peer(), job_peer) << error.what();
  }
}

// Processes 0 and 1, with a group of their own and one with process 2.
class Families : public testing::Test {
 protected:
  Families() {
    for (int rank = 0; rank < 2; ++rank) {
      const auto family = std::make_shared<Family>();
      pair_[rank].join(family);
      all_[rank].join(family);
    }
  }

  Ranks pair_{2};
  Ranks all_{3, "inproc", {}, {}, /*mortal=*/true};
};

template <typename E>
void expect_fails(Communicator& comm, Rank peer, Rank job_peer) {
  try {
    reduce(comm);
    ADD_FAILURE() << "it works";
  } catch (const E& error) {
    EXPECT_EQ(error.peer(), peer) << error.what();
    EXPECT_EQ(error.job_peer(), job_peer) << error.what();
  }
}

TEST_F(Families, AFailureEndsTheOthersOfAProcess) {
  std::thread far([this] { expect_fails<TransportError>(pair_[0], kNoPeer, 2); });
  all_.vanish(2);
  expect_fails<TransportError>(all_[1], 2, 2);
  expect_fails<TransportError>(pair_[1], kNoPeer, 2);
  far.join();
  expect_fails<TransportError>(all_[0], 2, 2);
}

TEST_F(Families, AnAbortEndsTheOthersUnlessItIsAlone) {
  all_[1].abort("enough", /*alone=*/true);
  expect_fails<Aborted>(all_[0], 1, 1);
  pair_.run([](Communicator& comm) { reduce(comm); });
  pair_[1].abort("the program ends", /*alone=*/false);
  expect_fails<Aborted>(pair_[0], 1, 1);
}

TEST_F(Families, AnAbortOfTheProgramEndsAll) {
  all_[2].abort("the program ends", /*alone=*/false);
  expect_fails<Aborted>(all_[1], 2, 2);
  expect_fails<Aborted>(pair_[0], kNoPeer, 2);
}

TEST_F(Families, CallsThatDifferEndNoOthers) {
  all_.outcomes([](Communicator& comm) { reduce(comm, 30, comm.identity().rank == 1 ? 5 : 6); });
  EXPECT_TRUE(all_[0].closed());
  pair_.run([](Communicator& comm) { reduce(comm); });
}

TEST_F(Families, WhoHasClosedHasLeft) {
  all_.run([](Communicator& comm) { comm.close(5); });
  pair_.run([](Communicator& comm) { reduce(comm); });
  pair_[0].abort("the program ends", /*alone=*/false);
  expect_fails<Aborted>(pair_[1], 0, 0);
}

// Process 0 waits for process 1 with less patience than that waits for process 2, which is late.
TEST_F(Families, AWaitElsewhereIsFollowed) {
  std::thread waits([this] { EXPECT_THROW(reduce(all_[1], 60), Timeout); });
  try {
    reduce(pair_[0], 2);
    ADD_FAILURE() << "it works";
  } catch (const Timeout& error) {
    EXPECT_EQ(error.peer(), kNoPeer) << error.what();
    EXPECT_EQ(error.job_peer(), 2) << error.what();
    EXPECT_NE(std::string(error.what()).find("rank 2 of the job"), std::string::npos);
  }
  waits.join();  // by the failure of process 0
}

// Process 1 waits for process 2 and answers meanwhile, so that process 0 names nobody in vain.
TEST_F(Families, AWaitThatIsOverIsForgotten) {
  std::thread waits([this] { reduce(all_[1]); });
  std::thread also([this] { reduce(all_[0]); });
  pair_[0].check_failure(0.4);  // in which it hears whom process 1 waits for
  reduce(all_[2]);
  waits.join();
  also.join();
  try {
    reduce(pair_[0], 1);
    ADD_FAILURE() << "it works";
  } catch (const Timeout& error) {
    EXPECT_EQ(error.peer(), 1) << error.what();
  }
}

// Process 1 is slow, and waits for none of the messages between it and process 2.
TEST_F(Families, AMessageThatNobodyWaitsForIsNoWait) {
  std::vector<std::byte> message(100), large(1 << 22);
  const auto receive = all_[1].receive(message.data(), message.size(), 2, 60);
  const auto send = all_[1].send(large.data(), large.size(), 2, 60);
  std::thread background(
      [&] { EXPECT_THROW(all_[1].wait(*receive, 60, nullptr, /*background=*/true), Timeout); });
  expect_timeout(pair_[0], 1, 1);
  background.join();  // by the failure of process 0
}

TEST_F(Families, AMessageThatIsWaitedForIsAWait) {
  std::vector<std::byte> message(100);
  const auto receive = all_[1].receive(message.data(), message.size(), 2, 60);
  std::thread waits([&] { EXPECT_THROW(all_[1].wait(*receive, 60), Timeout); });
  expect_timeout(pair_[0], kNoPeer, 2);
  waits.join();
}

// A recv from any rank, for which nobody waits, delivers the message of rank 2, for which a thread
// does.
TEST_F(Families, AMessageThatIsAwaitedByOtherMeansIsAWait) {
  std::vector<std::byte> message(100);
  all_[1].receive(message.data(), message.size(), Transfer::kAnyRank, 60);
  all_[1].awaited_senders().add(2);
  expect_timeout(pair_[0], kNoPeer, 2);
}

TEST_F(Families, ACallThatNobodyWaitsForIsNoWaitElsewhere) {
  std::vector<float> x(10);
  const Array arrays[] = {array_of(x)};
  Request request;
  request.algorithm = "ring";
  request.inputs = request.outputs = arrays;
  request.timeout = 60;
  all_[1].submit(request);
  expect_timeout(pair_[0], 1, 1);
}

TEST(Family, FailuresAndEndsAtOnce) {
  for (int round = 0; round < 20; ++round) {
    std::vector<std::unique_ptr<Ranks>> groups;
    std::vector<std::shared_ptr<Family>> families;
    for (int rank = 0; rank < 2; ++rank) families.push_back(std::make_shared<Family>());
    for (int group = 0; group < 4; ++group) {
      groups.push_back(std::make_unique<Ranks>(2));
      for (int rank = 0; rank < 2; ++rank) (*groups.back())[rank].join(families[rank]);
    }
    std::vector<std::thread> threads;
    for (int group = 0; group < 4; ++group)
      for (int rank = 0; rank < 2; ++rank)
        threads.emplace_back([&, group, rank] {
          Communicator& comm = (*groups[static_cast<std::size_t>(group)])[rank];
          try {
            if (group == 0) comm.close(0);
            if (group == 1 && rank == 0) comm.abort("one", /*alone=*/false);
            if (group == 2 && rank == 1) comm.abort("two", /*alone=*/false);
            for (;;) reduce(comm);
          } catch (const Error&) {
          }
        });
    for (std::thread& each : threads) each.join();
  }
}

}  // namespace exec_family_test
}  // namespace gradwire::exec
