// Messages over a fake NCCL, whose ranks are threads: what arrives, and how every failure ends,
// where communicators block and where they do not.
#include "gradwire/cuda/messages/messages_nccl.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "cuda_nccl_ranks.h"
#include "gradwire/cuda/device.h"

namespace gradwire::cuda {
namespace {

#ifdef __SANITIZE_THREAD__
constexpr bool kForkWorks = false;  // ThreadSanitizer does not follow a fork with threads
#else
constexpr bool kForkWorks = true;
#endif

// Of communicators that do not block, and of those that do.
class NcclMessages : public OverFakeNccl, public testing::WithParamInterface<bool> {
 protected:
  NcclMessages() : OverFakeNccl(GetParam()) {}
};
INSTANTIATE_TEST_SUITE_P(Communicators, NcclMessages, testing::Bool(), [](const auto& tested) {
  return tested.param ? "ThatBlock" : "ThatDoNotBlock";
});

class NcclMessagesThatDoNotBlock : public OverFakeNccl {
 protected:
  NcclMessagesThatDoNotBlock() : OverFakeNccl(false) {}
};

// --- what arrives ---

// All to all, `rounds` times: two messages to each rank, itself among them, some of no bytes.
void exchange_all(Messages& self, int rank, int size, int rounds) {
  const auto bytes = [](int from, int to, int which, int round) {
    return static_cast<std::size_t>((from * 37 + to * 11 + which * 5 + round) % 7 * 100);
  };
  const auto seed = [](int from, int to, int which, int round) {
    return static_cast<unsigned>(((from * 8 + to) * 2 + which) * 100 + round);
  };
  for (int round = 0; round < rounds; ++round) {
    std::vector<Payload> sent, got;
    for (int i = 0; i < 2 * size; ++i) {
      sent.push_back(filled(bytes(rank, i / 2, i % 2, round), seed(rank, i / 2, i % 2, round)));
      got.emplace_back(bytes(i / 2, rank, i % 2, round));
    }
    self.begin();
    for (int i = 0; i < 2 * size; ++i) {
      const auto k = static_cast<std::size_t>(i);
      self.receive(got[k].data(), got[k].size(), i / 2);
      self.send(sent[k].data(), sent[k].size(), i / 2);
    }
    self.end(nullptr);
    for (int i = 0; i < 2 * size; ++i)
      ASSERT_EQ(got[static_cast<std::size_t>(i)],
                filled(bytes(i / 2, rank, i % 2, round), seed(i / 2, rank, i % 2, round)))
          << "from " << i / 2 << " to " << rank << ", round " << round;
  }
}

TEST_P(NcclMessages, EveryMessageArrivesInOrder) {
  for (int questions : {0, 3}) {
    fake.in_progress(questions);
    for (int size : {1, 2, 3, 4, 5, 8}) {
      const auto all = mesh(size);
      run_threads(size, [&](int rank) {
        exchange_all(*all[static_cast<std::size_t>(rank)], rank, size, 4);
      });
    }
  }
}

TEST_P(NcclMessages, ASuccessThatIsSaidTooEarlyIsNotBelieved) {
  fake.in_progress(5);
  fake.hasten();
  const auto all = mesh(3);
  run_threads(3, [&](int rank) { exchange_all(*all[static_cast<std::size_t>(rank)], rank, 3, 4); });
}

TEST_P(NcclMessages, AnEndIsOneGroup) {
  const auto self = alone();
  for (int i = 0; i < 3; ++i) talk(*self);
  EXPECT_EQ(fake.calls("ncclGroupStart"), 3);
  EXPECT_EQ(fake.calls("ncclGroupEnd"), 3);
}

TEST_P(NcclMessages, NothingIsSentWhereThereIsNothing) {
  const auto self = alone();
  self->begin();
  self->end(nullptr);
  self->begin();
  self->send(nullptr, 0, 0);
  self->receive(nullptr, 0, 0);
  self->end(nullptr);
  EXPECT_EQ(fake.calls("ncclGroupStart"), 0);
}

TEST_P(NcclMessages, CountsHave64Bits) {
  const auto self = alone();
  fake.fail("ncclGroupEnd", nccl::kSystemError, 0);  // so that nothing is copied
  constexpr std::size_t kBytes = (std::size_t{5} << 32) + 3;
  std::byte here{};
  self->begin();
  self->send(&here, kBytes, 0);
  EXPECT_THROW(self->end(nullptr), TransportError);
  EXPECT_EQ(fake.last_count(), kBytes);
}

TEST_P(NcclMessages, IsPartOfItsStream) {
  const Api& api = load_api(GRADWIRE_SIMULATED_CUDA_SO);
  fake.copy_by(&api);
  const auto all = mesh(3);
  run_threads(3, [&](int rank) {
    OwnedStream stream(api);
    const auto& self = all[static_cast<std::size_t>(rank)];
    Room mine(api), theirs(api);
    std::byte* from = mine.take(1000);
    std::byte* to = theirs.take(1000);
    Payload host(1000);
    for (int round = 0; round < 5; ++round) {
      api.fill(from, rank * 16 + round, 1000, stream.get());
      self->begin();
      self->send(from, 1000, (rank + 1) % 3);
      self->receive(to, 1000, (rank + 2) % 3);
      self->end(stream.get());
      api.fill(from, 255, 1000, stream.get());  // it is free again
      api.copy(host.data(), to, 1000, CopyKind::kToHost, stream.get());
      check(api, api.synchronize(stream.get()), "synchronize");
      ASSERT_EQ(host, Payload(1000, static_cast<std::byte>((rank + 2) % 3 * 16 + round)));
    }
  });
}

TEST_P(NcclMessages, AWrongRankIsRefusedAndTheRestLives) {
  const auto self = alone();
  std::byte here{};
  self->begin();
  for (Rank wrong : {-1, 1}) {
    EXPECT_THROW(self->send(&here, 1, wrong), InvalidArgument);
    EXPECT_THROW(self->receive(&here, 1, wrong), InvalidArgument);
  }
  talk(*self);
  self->check();
}

// --- how it begins and ends ---

TEST_F(NcclMessagesThatDoNotBlock, ARankThatIsMissingIsATimeout) {
  const auto error = thrown_by<Timeout>([&] { first(2, {.timeout_seconds = 0.1}); });
  expect_words(error.what(), {"rank 0: ", "ncclCommInitRank", "0.1 s", "NCCL_DEBUG"});
  EXPECT_EQ(error.peer(), 1);
  EXPECT_EQ(thrown_by<Timeout>([&] { first(3, {.timeout_seconds = 0.1}); }).peer(), kNoPeer);
}

TEST_F(NcclMessagesThatDoNotBlock, AnInterruptEndsTheInitialisation) {
  const auto interrupt = [] { throw std::string("Ctrl-C"); };
  EXPECT_THROW(first(2, {.interrupt = interrupt}), std::string);
  EXPECT_EQ(fake.calls("ncclCommAbort"), 1);
}

TEST_P(NcclMessages, AHealthyOneIsFinalizedAndDestroyed) {
  fake.in_progress(3);
  talk(*alone());
  EXPECT_EQ(fake.calls("ncclCommFinalize"), 1);
  EXPECT_EQ(fake.calls("ncclCommDestroy"), 1);
  EXPECT_EQ(fake.calls("ncclCommAbort"), 0);
}

TEST_P(NcclMessages, OneThatDoesNotComeToItsEndIsAborted) {
  fake.hang("ncclCommFinalize");
  alone({.ending_seconds = 0.1}).reset();
  fake.reset();
  fake.fail("ncclCommFinalize", nccl::kInternalError, 0);
  alone().reset();
  EXPECT_EQ(fake.calls("ncclCommDestroy"), 0);
  EXPECT_EQ(fake.calls("ncclCommAbort"), 1);
}

TEST_P(NcclMessages, ADestroyThatHangsIsLeftAlone) {
  fake.block("ncclCommDestroy");
  testing::internal::CaptureStderr();
  alone({.ending_seconds = 0.1}).reset();
  expect_words(testing::internal::GetCapturedStderr(), {"rank 0: ncclCommDestroy takes long"});
  fake.reset();
}

TEST_F(NcclMessagesThatDoNotBlock, EndingThreadsUseTheRanksDevice) {
  const auto here = std::this_thread::get_id();
  std::atomic<int> elsewhere = 0;
  const NcclSettings settings{
      .use_device = [&] { elsewhere += std::this_thread::get_id() != here ? 1 : 0; }};
  alone(settings).reset();
  EXPECT_EQ(elsewhere, 1);
  alone(settings)->abort();
  EXPECT_EQ(elsewhere, 2);
}

TEST_P(NcclMessages, AForkLeavesItAlone) {
  if (!kForkWorks) GTEST_SKIP() << "no fork under ThreadSanitizer";
  auto self = alone();
  const auto other = alone();
  const pid_t child = ::fork();
  if (child == 0) {
    self.reset();
    other->abort();
    ::_exit(fake.alive() == 2 && fake.calls("ncclCommFinalize") == 0 ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  talk(*self);
  talk(*other);
}

TEST_F(NcclMessagesThatDoNotBlock, NcclMayNotBeMadeToBlock) {
  ::setenv("NCCL_COMM_BLOCKING", "1", 1);
  const auto error = thrown_by<InvalidArgument>([&] { alone(); });
  ::setenv("NCCL_COMM_BLOCKING", "0", 1);
  alone();
  ::unsetenv("NCCL_COMM_BLOCKING");
  expect_words(error.what(), {"NCCL_COMM_BLOCKING=1", "unset it"});
}

// --- what fails ---

TEST_F(NcclMessagesThatDoNotBlock, AnIdThatCannotBeMadeSaysWhy) {
  fake.fail("ncclGetUniqueId", nccl::kSystemError, 0);
  const auto error = thrown_by<TransportError>([&] { make_unique_id(nccl()); });
  expect_words(error.what(), {"ncclGetUniqueId", "an error of the fake (2)", "as the test wanted"});
}

TEST_P(NcclMessages, AMeetingThatFailsSaysWhy) {
  for (const char* call : {"ncclCommInitRankConfig", "ncclCommGetAsyncError"}) {
    fake.reset();
    fake.fail(call, nccl::kUnhandledCudaError, 0);
    const auto error = thrown_by<TransportError>([&] { alone(); });
    expect_words(error.what(), {"rank 0: ", "ncclCommInitRank", "an error of the fake (1)"});
    EXPECT_EQ(fake.alive(), 0) << call;
  }
}

TEST_P(NcclMessages, AGroupThatFailsIsFinal) {
  for (const char* call :
       {"ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd", "ncclCommGetAsyncError"}) {
    fake.reset();
    const auto self = alone();
    talk(*self);
    fake.fail(call, nccl::kSystemError, 0);
    const auto error = thrown_by<TransportError>([&] { talk(*self); });
    expect_words(error.what(), {"rank 0: NCCL failed in a group with rank 0",
                                "an error of the fake (2)", "as the test wanted"});
    EXPECT_EQ(error.peer(), kNoPeer) << call;
    EXPECT_EQ(fake.alive(), 0) << call << ": nothing may touch the memory any more";
    const int calls = fake.calls("ncclGroupStart");
    EXPECT_STREQ(thrown_by<TransportError>([&] { talk(*self); }).what(), error.what());
    EXPECT_STREQ(thrown_by<TransportError>([&] { self->check(); }).what(), error.what());
    EXPECT_EQ(fake.calls("ncclGroupStart"), calls);
    EXPECT_EQ(fake.open_groups(), 0) << call;
  }
}

TEST_P(NcclMessages, ALostPeerIsNamedWhereItCanOnlyBeThat) {
  for (const auto& [size, peer] : {std::pair{2, 1}, {3, 1}}) {
    const auto all = mesh(size);
    fake.fail("ncclGroupEnd", nccl::kRemoteError, 0);
    const auto error = thrown_by<TransportError>([&] { wait_in_vain(*all[0]); });
    expect_words(error.what(), {"a group with rank 1", "remote process exited (6)"});
    EXPECT_EQ(error.peer(), peer);
    fake.fail("ncclGroupEnd", 0, 0);
  }
  const auto all = mesh(3);
  std::byte ignored{};
  fake.fail("ncclGroupEnd", nccl::kRemoteError, 0);
  all[0]->begin();
  for (Rank from : {2, 1, 2}) all[0]->receive(&ignored, 1, from);
  const auto error = thrown_by<TransportError>([&] { all[0]->end(nullptr); });
  expect_words(error.what(), {"a group with ranks 1, 2"});
  EXPECT_EQ(error.peer(), kNoPeer);
}

TEST_P(NcclMessages, WhatFailsLaterIsFoundByACheck) {
  const auto all = mesh(2);
  all[0]->check();
  fake.fail("ncclCommGetAsyncError", nccl::kRemoteError, 0);
  const auto error = thrown_by<TransportError>([&] { all[0]->check(); });
  fake.fail("ncclCommGetAsyncError", 0, 0);
  expect_words(error.what(), {"what is enqueued", "remote process exited (6)"});
  EXPECT_EQ(error.peer(), 1);
  EXPECT_EQ(fake.calls("ncclCommAbort"), 1);
  EXPECT_THROW(all[0]->begin(), TransportError);
}

TEST_P(NcclMessages, APeerThatDoesNotComeIsATimeout) {
  const auto all = mesh(3, {.timeout_seconds = 0.3});
  const auto error = thrown_by<Timeout>([&] { wait_in_vain(*all[0]); });
  expect_words(error.what(), {"rank 0: ", "a group with rank 1", "0.3 s", "as the test wanted"});
  EXPECT_EQ(error.peer(), 1);
  EXPECT_EQ(fake.calls("ncclCommAbort"), 1);
}

TEST_P(NcclMessages, AnInterruptEndsAGroup) {
  std::atomic<bool> interrupted = false;
  const NcclSettings settings{.interrupt = [&] {
    if (interrupted) throw std::string("Ctrl-C");
  }};
  const auto all = mesh(2, settings);
  interrupted = true;
  EXPECT_THROW(wait_in_vain(*all[0]), std::string);
  EXPECT_EQ(fake.calls("ncclCommAbort"), 1);
  EXPECT_THROW(all[0]->begin(), Aborted);
}

// --- abort ---

TEST_P(NcclMessages, AnAbortEndsAGroupFromAnyThread) {
  const auto all = mesh(2);
  std::jthread aborter([&] {
    while (fake.calls("ncclGroupEnd") == 0) std::this_thread::yield();
    all[0]->abort();
  });
  const auto error = thrown_by<Aborted>([&] { wait_in_vain(*all[0]); });
  expect_words(error.what(), {"rank 0: ", "aborted"});
  aborter.join();
  EXPECT_THROW(all[0]->begin(), Aborted);
  EXPECT_THROW(all[0]->check(), Aborted);
}

TEST_F(NcclMessagesThatDoNotBlock, WhoIsAbortedComesBackWhenTheAbortIsOver) {
  const auto self = alone({.ending_seconds = 2});
  fake.block("ncclCommAbort");
  std::jthread aborter([&] { self->abort(); });
  while (fake.calls("ncclCommAbort") == 0) std::this_thread::yield();
  const auto begun = Deadline::Clock::now();
  self->abort();
  EXPECT_GT(Deadline::Clock::now() - begun, std::chrono::milliseconds(150));
  aborter.join();
  fake.reset();
}

TEST_F(NcclMessagesThatDoNotBlock, AnAbortIsOneHoweverOftenItIsAsked) {
  const auto all = mesh(2);
  run_threads(4, [&](int) { all[0]->abort(); });
  all[0]->abort();
  EXPECT_EQ(fake.calls("ncclCommAbort"), 1);
  EXPECT_THROW(wait_in_vain(*all[0]), Aborted);
}

TEST_F(NcclMessagesThatDoNotBlock, AnAbortWaitsForACallThatIsUnderWay) {
  const auto all = mesh(2);
  const int before = fake.calls("ncclCommGetAsyncError");
  fake.linger("ncclCommGetAsyncError", 100);
  std::jthread aborter([&] {
    while (fake.calls("ncclCommGetAsyncError") == before) std::this_thread::yield();
    all[0]->abort();
  });
  EXPECT_THROW(wait_in_vain(*all[0]), Aborted);
}

TEST_F(NcclMessagesThatDoNotBlock, AnAbortGetsACallOutOfNccl) {
  for (const char* call : {"ncclGroupEnd", "ncclCommGetAsyncError"}) {
    const auto all = mesh(2);
    const int before = fake.calls(call);
    fake.block(call);
    std::jthread aborter([&] {
      while (fake.calls(call) == before) std::this_thread::yield();
      for (const auto& each : all) each->abort();
    });
    EXPECT_THROW(wait_in_vain(*all[0]), Aborted) << call;
    aborter.join();
    fake.reset();
  }
}

TEST_F(NcclMessagesThatDoNotBlock, AnAbortThatHangsIsLeftAlone) {
  const auto self = alone({.ending_seconds = 0.1});
  fake.block("ncclCommAbort");
  testing::internal::CaptureStderr();
  self->abort();
  expect_words(testing::internal::GetCapturedStderr(), {"rank 0: ncclCommAbort takes long"});
  EXPECT_THROW(talk(*self), Aborted);
  fake.reset();
}

}  // namespace
}  // namespace gradwire::cuda
