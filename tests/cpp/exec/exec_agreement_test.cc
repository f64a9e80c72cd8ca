// Ranks that do not make the same calls all learn it, and who called what, even where they would
// never exchange data.
#include <gtest/gtest.h>

#include <array>
#include <atomic>

#include "exec_ranks.h"
#include "gradwire/base/error.h"
#include "gradwire/schedule/generators.h"

namespace gradwire::exec {
namespace exec_agreement_test {

using Body = std::function<void(Communicator&)>;

struct Call {
  Collective collective = Collective::kAllReduce;
  std::size_t count = 10;
  ReduceOp op = ReduceOp::kSum;
  Rank root = 0;
  std::string_view algorithm = "auto";
  const char* codec = "none";
  const schedule::Schedule* schedule = nullptr;
  DType dtype = DType::kFloat32;
};

void make(Communicator& comm, const Call& call) {
  std::vector<double> memory(call.count, 1);
  const Array arrays[] = {{reinterpret_cast<std::byte*>(memory.data()), call.count}};
  Request request;
  request.collective = call.collective;
  request.dtype = call.dtype;
  request.op = call.op;
  request.root = call.root;
  request.algorithm = call.algorithm;
  request.schedule = call.schedule;
  if (call.schedule != nullptr) request.schedule_digest = schedule::digest(*call.schedule);
  request.codec = codec::make_codec(call.codec);
  request.inputs = request.outputs = arrays;
  request.timeout = 10;
  comm.run(request);
}

std::string message_of(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
    return "no error";
  } catch (const InvalidArgument& e) {
    return e.what();
  } catch (const std::exception& e) {
    return std::string("another error: ") + e.what();
  }
}

void expect_all_told(const std::vector<std::exception_ptr>& errors,
                     const std::vector<std::string>& words) {
  for (std::size_t rank = 0; rank < errors.size(); ++rank) {
    const std::string message = message_of(errors[rank]);
    for (const std::string& word : words)
      EXPECT_NE(message.find(word), std::string::npos)
          << "rank " << rank << " has no '" << word << "': " << message;
  }
}

class Agreement : public testing::TestWithParam<const char*> {};

TEST_P(Agreement, EveryKindOfDifferenceIsShownToAll) {
  const Call usual;
  schedule::Schedule own = schedule::generate({Collective::kAllReduce, "ring", 3, 0, {}});
  schedule::Schedule reversed = own;
  std::reverse(reversed.rounds[0].begin(), reversed.rounds[0].end());
  struct Case {
    Call one, other;
    std::vector<std::string> words;
  };
  const std::vector<Case> cases = {
      {usual, {.count = 11}, {"float32[10]", "float32[11]"}},
      {usual, {.op = ReduceOp::kMax}, {"op=sum", "op=max"}},
      {usual, {.dtype = DType::kFloat64}, {"float32[10]", "float64[10]"}},
      {usual, {.algorithm = "ring"}, {"by cost model #", "algorithm=ring"}},
      {{.codec = "fp16"}, {.codec = "bf16"}, {"codec=fp16", "codec=bf16"}},
      {{.schedule = &own}, {.schedule = &reversed}, {"algorithm=ring #"}},
      {usual, {.collective = Collective::kReduce}, {"all_reduce(", "called reduce("}},
      {{.collective = Collective::kBroadcast},
       {.collective = Collective::kBroadcast, .root = 1},
       {"root=0", "root=1"}},
  };
  for (const Case& each : cases) {
    Ranks ranks(3, GetParam());
    const auto errors = ranks.outcomes([&](Communicator& comm) {
      make(comm, comm.identity().rank == 1 ? each.other : each.one);
      make(comm, usual);
    });
    expect_all_told(errors, each.words);
    expect_all_told(errors, {"ranks disagree in call 0: ranks 0, 2 called", "; rank 1 called"});
    for (const auto& error : errors) EXPECT_EQ(message_of(error), message_of(errors[0]));
  }
}

TEST_P(Agreement, AnotherOrderIsShownAtTheFirstCall) {
  Ranks ranks(4, GetParam());
  const Call one, other = {.count = 77};
  expect_all_told(ranks.outcomes([&](Communicator& comm) {
    make(comm, one);
    make(comm, comm.identity().rank == 3 ? other : one);
    make(comm, comm.identity().rank == 3 ? one : other);
  }),
                  {"ranks disagree in call 1: ranks 0-2 called all_reduce(float32[10]",
                   "rank 3 called all_reduce(float32[77]"});
}

// Two roots that broadcast to each other never wait: they learn it at their next call ...
TEST_P(Agreement, RanksThatDoNotWaitAreToldAtTheirNextCall) {
  Ranks ranks(2, GetParam());
  expect_all_told(ranks.outcomes([](Communicator& comm) {
    make(comm, {.collective = Collective::kBroadcast, .root = comm.identity().rank});
    make(comm, {});
  }),
                  {"ranks disagree in call 0: rank 0 called broadcast(", "root=0", "root=1"});
}

// ... or when they close together.
TEST_P(Agreement, CloseComparesTheCalls) {
  Ranks ranks(2, GetParam());
  expect_all_told(ranks.outcomes([](Communicator& comm) {
    make(comm, {.collective = Collective::kBroadcast, .root = comm.identity().rank});
    comm.close(10);
  }),
                  {"ranks disagree in call 0", "root=0", "root=1"});
}

TEST_P(Agreement, CloseComparesHowManyCallsWereMade) {
  Ranks ranks(2, GetParam());
  expect_all_told(
      ranks.outcomes([](Communicator& comm) {
        make(comm, {});
        if (comm.identity().rank == 0) make(comm, {.collective = Collective::kBroadcast});
        comm.close(10);
      }),
      {"ranks disagree in call 1: rank 0 called broadcast(", "rank 1 left after 1 call"});
}

// Ranks 0 and 1 alone would go on for ever, and so would 2 and 3.
TEST_P(Agreement, RanksThatGoOnAreTold) {
  Ranks ranks(4, GetParam());
  const auto errors = ranks.outcomes([](Communicator& comm) {
    const Rank root = comm.identity().rank < 2 ? 0 : 2;
    for (;;) make(comm, {.collective = Collective::kBroadcast, .root = root, .algorithm = "star"});
  });
  expect_all_told(errors, {"ranks disagree in call 0: ranks 0, 1 called", "; ranks 2, 3 called"});
}

TEST_P(Agreement, ARankElsewhereIsNotWaitedForLong) {
  Ranks ranks(3, GetParam());
  std::atomic<int> ended{0};
  const auto began = Deadline::Clock::now();
  const auto errors = ranks.outcomes([&](Communicator& comm) {
    const int rank = comm.identity().rank;
    if (rank == 2)
      while (ended < 2) std::this_thread::yield();
    try {
      make(comm, {.count = rank == 0 ? 10U : 11U});
    } catch (...) {
      ++ended;
      throw;
    }
  });
  EXPECT_LT(Deadline::Clock::now() - began, std::chrono::seconds(5));
  expect_all_told(errors, {"rank 0 called", "rank 1 called", "rank 2 did not say in time"});
}

TEST_P(Agreement, ThousandsOfEqualCallsAreNoDifference) {
  Ranks ranks(3, GetParam());
  ranks.run([](Communicator& comm) {
    for (int i = 0; i < 5'000; ++i) {  // some announcements long
      make(comm, {.collective = Collective::kBroadcast, .root = i % 3});
      if (i % 10 == 0) make(comm, {});
    }
    make(comm, {});
    comm.close(10);
  });
}

INSTANTIATE_TEST_SUITE_P(Transports, Agreement, testing::Values("inproc", "shm", "tcp"));

}  // namespace exec_agreement_test
}  // namespace gradwire::exec
