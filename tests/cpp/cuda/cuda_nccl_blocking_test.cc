// Messages over NCCL communicators that block, of a fake NCCL whose ranks are threads: one thread
// makes all calls, and every failure ends as it does with communicators that do not block.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <random>
#include <thread>

#include "fake_nccl.h"
#include "gradwire/base/error.h"
#include "gradwire/cuda/device.h"
#include "gradwire/cuda/messages/messages_nccl.h"
#include "transport_harness.h"

namespace gradwire::cuda {
namespace {

using transport::run_threads;
using Payload = std::vector<std::byte>;
using All = std::vector<std::unique_ptr<Messages>>;

constexpr std::chrono::seconds kNotHung{100};

class BlockingNccl : public testing::Test {
 protected:
  BlockingNccl() { fake.reset(); }
  ~BlockingNccl() override {
    EXPECT_EQ(fake.calls("misuse"), 0);
    EXPECT_EQ(fake.alive(), 0);
    EXPECT_LT(Deadline::Clock::now() - begun_, kNotHung) << "something hung";
    fake.reset();
  }

  static const Nccl& nccl() {
    ::setenv("GRADWIRE_NCCL_SO", GRADWIRE_FAKE_NCCL, 1);
    return Nccl::load();
  }
  static std::unique_ptr<Messages> join(const nccl::UniqueId& id, Rank rank, int size,
                                        NcclSettings settings) {
    settings.rank = rank;
    settings.size = size;
    settings.blocking = true;
    return make_nccl_messages(nccl(), id, std::move(settings));
  }
  static All mesh(int size, const NcclSettings& settings = {}) {
    All all(static_cast<std::size_t>(size));
    const nccl::UniqueId id = make_unique_id(nccl());
    run_threads(size,
                [&](int r) { all[static_cast<std::size_t>(r)] = join(id, r, size, settings); });
    return all;
  }
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
  // A group of rank 0 that nobody answers.
  static void wait_in_vain(Messages& self) {
    static std::byte ignored{};
    self.begin();
    self.receive(&ignored, 1, 1);
    self.end(nullptr);
  }

  const FakeNccl& fake = fake_nccl();

 private:
  const Deadline::Clock::time_point begun_ = Deadline::Clock::now();
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

TEST_F(BlockingNccl, IsPartOfItsStream) {
  const Api& api = load_api(GRADWIRE_SIMULATED_CUDA_SO);
  fake.copy_by(&api);
  All all = mesh(2);
  run_threads(2, [&](int rank) {
    OwnedStream stream(api);
    const auto& self = all[static_cast<std::size_t>(rank)];
    Room mine(api), theirs(api);
    std::byte *const from = mine.take(1000), *const to = theirs.take(1000);
    Payload host(1000);
    for (int round = 0; round < 4; ++round) {
      api.fill(from, rank * 16 + round, 1000, stream.get());
      self->begin();
      self->send(from, 1000, 1 - rank);
      self->receive(to, 1000, 1 - rank);
      self->end(stream.get());
      api.fill(from, 255, 1000, stream.get());
      api.copy(host.data(), to, 1000, CopyKind::kToHost, stream.get());
      check(api, api.synchronize(stream.get()), "synchronize");
      EXPECT_EQ(host, Payload(1000, static_cast<std::byte>((1 - rank) * 16 + round)));
    }
  });
  end(all);
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

TEST_F(BlockingNccl, APeerThatDoesNotComeIsATimeout) {
  All all = mesh(2, {.timeout_seconds = 0.3});
  try {
    wait_in_vain(*all[0]);
    ADD_FAILURE() << "no error";
  } catch (const Timeout& error) {
    EXPECT_NE(std::string(error.what()).find("a group with rank 1"), std::string::npos);
    EXPECT_EQ(error.peer(), 1);
  }
  EXPECT_EQ(fake.calls("ncclCommAbort"), 1);
  EXPECT_THROW(all[0]->begin(), Timeout);
}

TEST_F(BlockingNccl, AnAbortEndsAGroupFromAnyThread) {
  All all = mesh(2);
  std::jthread aborter([&] {
    while (fake.calls("ncclGroupEnd") == 0) std::this_thread::yield();
    all[0]->abort();
  });
  EXPECT_THROW(wait_in_vain(*all[0]), Aborted);
  aborter.join();
  EXPECT_THROW(all[0]->check(), Aborted);
  EXPECT_EQ(fake.calls("ncclCommAbort"), 1);
}

TEST_F(BlockingNccl, AnInterruptEndsAGroup) {
  std::atomic<bool> interrupted = false;
  const NcclSettings settings{.interrupt = [&] {
    if (interrupted) throw std::string("Ctrl-C");
  }};
  All all = mesh(2, settings);
  interrupted = true;
  EXPECT_THROW(wait_in_vain(*all[0]), std::string);
  EXPECT_EQ(fake.calls("ncclCommAbort"), 1);
}

TEST_F(BlockingNccl, AGroupThatFailsIsFinal) {
  for (const char* call :
       {"ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd", "ncclCommGetAsyncError"}) {
    fake.reset();
    All all = mesh(1);
    pass_on(*all[0], 0, 1, 0);
    fake.fail(call, nccl::kSystemError, 0);
    EXPECT_THROW(pass_on(*all[0], 0, 1, 1), TransportError) << call;
    EXPECT_EQ(fake.alive(), 0) << call << ": nothing may touch the memory any more";
    EXPECT_THROW(all[0]->check(), TransportError) << call;
    EXPECT_EQ(fake.open_groups(), 0) << call;
  }
}

TEST_F(BlockingNccl, AMeetingThatFailsSaysWhy) {
  fake.fail("ncclCommInitRankConfig", nccl::kUnhandledCudaError, 0);
  EXPECT_THROW(mesh(1), TransportError);
}

TEST_F(BlockingNccl, OneThatDoesNotComeToItsEndIsAborted) {
  fake.hang("ncclCommFinalize");
  All all = mesh(1, {.ending_seconds = 0.1});
  all.clear();
  EXPECT_EQ(fake.calls("ncclCommDestroy"), 0);
  EXPECT_EQ(fake.calls("ncclCommAbort"), 1);
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
