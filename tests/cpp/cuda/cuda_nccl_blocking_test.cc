// What only messages over NCCL communicators that block do: one thread makes all calls.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "cuda_nccl_ranks.h"

namespace gradwire::cuda {
namespace {

class BlockingNccl : public OverFakeNccl {
 protected:
  BlockingNccl() : OverFakeNccl(true) {}

  // All at once, since each waits for its peers.
  static void end(All& all) {
    run_threads(static_cast<int>(all.size()),
                [&](int r) { all[static_cast<std::size_t>(r)].reset(); });
  }

  // Each rank sends to the next one.
  static void pass_on(Messages& self, int rank, int size, int round) {
    const Payload sent(100, static_cast<std::byte>(16 * rank + round));
    Payload got(100);
    self.begin();
    self.send(sent.data(), sent.size(), (rank + 1) % size);
    self.receive(got.data(), got.size(), (rank + size - 1) % size);
    self.end(nullptr);
    EXPECT_EQ(got, Payload(100, static_cast<std::byte>(16 * ((rank + size - 1) % size) + round)));
  }
};

TEST_F(BlockingNccl, OneThreadMakesAllGroupsOfARank) {
  for (int size : {1, 2, 3, 5}) {
    fake.reset();
    All all = mesh(size);
    run_threads(size, [&](int rank) {
      for (int round = 0; round < 8; ++round)
        pass_on(*all[static_cast<std::size_t>(rank)], rank, size, round);
    });
    EXPECT_EQ(fake.group_threads(), size);
    end(all);
    EXPECT_EQ(fake.calls("ncclCommDestroy"), size);
    EXPECT_EQ(fake.calls("ncclCommAbort"), 0);
  }
}

// The thread stays in NCCL; where the rank comes after all, it aborts what nobody waits for.
TEST_F(BlockingNccl, ARankThatIsMissingIsATimeout) {
  const nccl::UniqueId id = make_unique_id(nccl());
  testing::internal::CaptureStderr();
  EXPECT_THROW(join(id, 0, 2, {.timeout_seconds = 0.1}), Timeout);
  EXPECT_NE(testing::internal::GetCapturedStderr().find("a call into NCCL does not return"),
            std::string::npos);
  join(id, 1, 2, {}).reset();
  const Deadline deadline = Deadline::after(60);
  while (fake.alive() > 0 && !deadline.passed()) std::this_thread::yield();
}

TEST_F(BlockingNccl, ACheckDoesNotWaitForACallUnderWay) {
  All all = mesh(2);
  std::jthread poster([&] { EXPECT_THROW(wait_in_vain(*all[0]), Aborted); });
  while (fake.calls("ncclGroupEnd") == 0) std::this_thread::yield();
  const int asked = fake.calls("ncclCommGetAsyncError");
  all[0]->check();  // it would throw the poster's error, if it came back that late
  EXPECT_EQ(fake.calls("ncclCommGetAsyncError"), asked) << "of a communicator in a call";
  all[0]->abort();
}

// The call takes most of the time that it has, and its end is not known then. The shortest of some
// tries, since a busy machine may delay any.
TEST_F(BlockingNccl, AMeetingAndAGroupTakeTheirTimeoutOnce) {
  constexpr std::chrono::milliseconds kTimeout{400}, kCall{350};
  for (const char* call : {"ncclCommInitRankConfig", "ncclGroupEnd"}) {
    auto shortest = Deadline::Clock::duration::max();
    for (int i = 0; i < 5 && shortest >= 2 * kCall; ++i) {
      fake.reset();
      const NcclSettings settings{.timeout_seconds = 1e-3 * kTimeout.count()};
      std::unique_ptr<Messages> self = call[4] == 'G' ? alone(settings) : nullptr;
      fake.linger(call, kCall.count());
      fake.fail("ncclCommGetAsyncError", nccl::kInProgress, 0);
      const auto begun = Deadline::Clock::now();
      if (self)
        EXPECT_THROW(talk(*self), Timeout);
      else
        EXPECT_THROW(alone(settings), Timeout);
      shortest = std::min(shortest, Deadline::Clock::now() - begun);
    }
    EXPECT_LT(shortest, 2 * kCall) << call;
  }
}

// An abort that does not get a call out of NCCL: its thread is left alone.
TEST_F(BlockingNccl, ACallThatNeverReturnsIsLeftAlone) {
  All all = mesh(2, {.timeout_seconds = 0.1, .ending_seconds = 0.1});
  fake.block("ncclCommAbort");
  testing::internal::CaptureStderr();
  EXPECT_THROW(wait_in_vain(*all[0]), Timeout);
  all[0].reset();
  EXPECT_NE(testing::internal::GetCapturedStderr().find("a call into NCCL does not return"),
            std::string::npos);
  all[1].reset();
  fake.reset();
}

TEST_F(BlockingNccl, TheThreadUsesTheRanksDevice) {
  std::atomic<int> used = 0;
  All all = mesh(1, {.use_device = [&used] { ++used; }});
  EXPECT_EQ(used, 1);
  end(all);
  EXPECT_EQ(used, 2);  // and the thread that ends it
}

}  // namespace
}  // namespace gradwire::cuda
