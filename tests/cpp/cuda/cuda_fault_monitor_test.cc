// Calls on GPUs end in the same errors as on CPUs, whatever becomes of a rank.
#include <gtest/gtest.h>

#include <atomic>
#include <string>

#include "cuda_ranks.h"
#include "gradwire/base/error.h"
#include "gradwire/cuda/gpu_fault_monitor.h"

namespace gradwire::cuda {
namespace {

constexpr std::size_t kElements = 500;

struct Interrupted {};

// Ranks whose GPU is watched, each with two communicators of CPUs.
class Watched {
 public:
  explicit Watched(int size, const Api& api = simulated_api())
      : shadow_(size, "inproc", {}, {}, /*mortal=*/true),
        users_(size),
        loopback_(simulated_api(), size) {
    for (Rank r = 0; r < size; ++r) {
      auto its = loopback_.endpoint(r, 10, [this, r] {
        if (interrupted_ == r) throw Interrupted();
      });
      streams_.push_back(std::make_unique<OwnedStream>(simulated_api()));
      memory_.push_back(std::make_unique<DeviceBytes>(kElements * sizeof(float)));
      gpus_.push_back(
          std::make_unique<GpuCommunicator>(api, GpuIdentity{r, size, {}, 0}, std::move(its)));
      monitors_.push_back(std::make_unique<GpuFaultMonitor>(*gpus_.back(), shadow_[r], users_[r]));
    }
  }
  ~Watched() {
    simulated_cuda_hang(0);
    monitors_.clear();
    for (auto& each : streams_) simulated_api().synchronize(each->get());
  }

  exec::Ranks& side() { return shadow_; }
  exec::Ranks& users() { return users_; }
  // In the rank's next wait, as by Ctrl-C.
  void interrupt(Rank rank) { interrupted_ = rank; }
  void lose_messages() { loopback_.abort("lost"); }
  // For the rank's stream, as a host that wants the results.
  void wait_and_require_success(Rank rank) {
    simulated_api().synchronize(stream(rank));
    (*this)[rank].require_success();
  }
  Stream stream(Rank rank) { return streams_[static_cast<std::size_t>(rank)]->get(); }
  GpuFaultMonitor& operator[](Rank rank) { return *monitors_[static_cast<std::size_t>(rank)]; }

  // Later calls have no elements, and no messages for which captures would wait.
  void empty_calls() { elements_ = 0; }
  void fill_memory(Rank rank) {
    simulated_api().fill(memory_[static_cast<std::size_t>(rank)]->data(), 0, kElements,
                         stream(rank));
  }

  void call(Rank rank, double timeout = 10, ReduceOp op = ReduceOp::kSum,
            std::string_view algorithm = "ring") {
    const exec::Array array{memory_[static_cast<std::size_t>(rank)]->data(), elements_};
    exec::Request request;
    request.op = op;
    request.algorithm = algorithm;
    request.inputs = request.outputs = {&array, 1};
    request.timeout = timeout;
    (*this)[rank].run(request, nullptr, streams_[static_cast<std::size_t>(rank)]->get());
  }

  // In a thread for each rank; what each threw.
  std::vector<std::exception_ptr> outcomes(const std::function<void(Rank)>& body) {
    std::vector<std::exception_ptr> thrown(monitors_.size());
    std::vector<std::thread> threads;
    for (std::size_t r = 0; r < monitors_.size(); ++r)
      threads.emplace_back([&, r] {
        try {
          body(static_cast<Rank>(r));
        } catch (...) {
          thrown[r] = std::current_exception();
        }
      });
    for (auto& each : threads) each.join();
    return thrown;
  }

 private:
  exec::Ranks shadow_, users_;
  std::uint64_t elements_ = kElements;
  std::atomic<Rank> interrupted_ = -1;
  Loopback loopback_;
  std::vector<std::unique_ptr<OwnedStream>> streams_;
  std::vector<std::unique_ptr<DeviceBytes>> memory_;
  std::vector<std::unique_ptr<GpuCommunicator>> gpus_;
  std::vector<std::unique_ptr<GpuFaultMonitor>> monitors_;
};

template <typename Kind>
void expect_all(const std::vector<std::exception_ptr>& thrown, Rank except, Rank culprit) {
  for (std::size_t r = 0; r < thrown.size(); ++r) {
    if (static_cast<Rank>(r) == except) continue;
    ASSERT_TRUE(thrown[r]) << "rank " << r << " threw nothing";
    try {
      std::rethrow_exception(thrown[r]);
    } catch (const Kind& error) {
      EXPECT_EQ(error.peer(), culprit) << error.what();
    } catch (const std::exception& error) {
      ADD_FAILURE() << "rank " << r << ": " << error.what();
    }
  }
}

TEST(GpuFaultMonitor, GoodCallsAreOver) {
  Watched ranks(3);
  const auto thrown = ranks.outcomes([&](Rank r) {
    for (int i = 0; i < 5; ++i) ranks.call(r);
    ranks[r].finish(10);
  });
  for (const auto& each : thrown) EXPECT_FALSE(each);
}

TEST(GpuFaultMonitor, ADeadRankIsNamed) {
  Watched ranks(3);
  const auto thrown = ranks.outcomes([&](Rank r) {
    ranks.call(r);
    ranks[r].finish(10);
    if (r == 1) return ranks.side().vanish(1);
    ranks.call(r);
    ranks[r].finish(10);
  });
  expect_all<TransportError>(thrown, 1, 1);
  EXPECT_THROW(ranks.users()[0].check_failure(1), TransportError)
      << "the users' communicator goes on";
}

TEST(GpuFaultMonitor, ARankThatDoesNotCallIsNamed) {
  Watched ranks(3);
  const auto thrown = ranks.outcomes([&](Rank r) {
    if (r == 2) return;
    ranks.call(r, /*timeout=*/1);
    ranks[r].finish(10);
  });
  expect_all<Timeout>(thrown, 2, 2);
}

// The driver's lock is not free, as while a kernel is loaded that waits for running ones to end.
std::atomic<bool> locked = false;
Status query_once_unlocked(Event event, int* done) {
  locked.wait(true);
  return simulated_api().query(event, done);
}

TEST(GpuFaultMonitor, AQuestionThatHangsHidesNoFailure) {
  Api api = simulated_api();
  api.query = query_once_unlocked;
  Watched ranks(2, api);
  locked = true;
  const auto thrown = ranks.outcomes([&](Rank r) {
    ranks.call(r);
    if (r == 1) return ranks.side().vanish(1);
    ranks[r].finish(10);
  });
  locked = false;
  locked.notify_all();
  ASSERT_TRUE(thrown[0]);
  EXPECT_THROW(std::rethrow_exception(thrown[0]), TransportError);
}

TEST(GpuFaultMonitor, ThreadsOfARankMayMakeItsCalls) {
  constexpr int kCalls = 100;
  Watched ranks(2);
  const auto thrown = ranks.outcomes([&](Rank r) {
    transport::run_threads(2, [&](int) {
      for (int call = 0; call < kCalls; ++call) ranks.call(r);
    });
    ranks[r].finish(10);
  });
  for (const auto& each : thrown) EXPECT_FALSE(each);
}

TEST(GpuFaultMonitor, ACommunicatorOfTheSameGpuOutlivesAnothersDeadRank) {
  constexpr int kCalls = 50;
  Watched all(3), group(3);
  const auto thrown = all.outcomes([&](Rank r) {
    std::thread other([&] {
      for (int call = 0; call < kCalls; ++call) group.call(r);
      group[r].finish(10);
    });
    try {
      for (int call = 0; call < kCalls; ++call) all.call(r);
      all[r].finish(10);
      if (r == 1) all.side().vanish(1);
      if (r != 1) all.call(r), all[r].finish(10);
    } catch (...) {
      other.join();
      throw;
    }
    other.join();
  });
  expect_all<TransportError>(thrown, 1, 1);
  const auto later = group.outcomes([&](Rank r) {
    group.call(r);
    group[r].finish(10);
  });
  for (const auto& each : later) EXPECT_FALSE(each);
}

// The monitor rests after the call, so nobody else can have looked.
TEST(GpuFaultMonitor, SuccessAsksTheMessagesThemselves) {
  Watched ranks(2);
  ranks.outcomes([&](Rank r) {
    ranks.call(r);
    ranks[r].finish(10);
    ranks.wait_and_require_success(r);
  });
  ranks.lose_messages();
  EXPECT_NO_THROW(ranks[0].require_alive());
  EXPECT_THROW(ranks.wait_and_require_success(0), Aborted);
  EXPECT_THROW(ranks[0].require_alive(), Aborted) << "the failure is for good";
}

TEST(GpuFaultMonitor, AbortEndsEverybody) {
  Watched ranks(3);
  const auto thrown = ranks.outcomes([&](Rank r) {
    if (r == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      return ranks[r].abort("enough");
    }
    ranks.call(r);
    ranks[r].finish(10);
  });
  expect_all<Aborted>(thrown, 0, 0);
}

TEST(GpuFaultMonitor, DifferentCallsAreToldApart) {
  Watched ranks(2);
  const auto thrown = ranks.outcomes([&](Rank r) {
    ranks.call(r, 10, r == 0 ? ReduceOp::kSum : ReduceOp::kMax);
    ranks[r].finish(10);
  });
  for (const auto& each : thrown) {
    ASSERT_TRUE(each);
    EXPECT_THROW(std::rethrow_exception(each), InvalidArgument);
  }
}

TEST(GpuFaultMonitor, AGpuThatHangsIsATimeout) {
  Watched ranks(2);
  simulated_cuda_hang(1);
  const auto thrown = ranks.outcomes([&](Rank r) {
    ranks.call(r, /*timeout=*/0.5);
    ranks[r].finish(10);
  });
  for (const auto& each : thrown) {
    ASSERT_TRUE(each);
    try {
      std::rethrow_exception(each);
    } catch (const Timeout& error) {
      EXPECT_NE(std::string(error.what()).find("did not come to the call"), std::string::npos)
          << error.what();
    }
  }
}

TEST(GpuFaultMonitor, AnInterruptIsForWhoMadeItAndAnAbortForTheRest) {
  Watched ranks(2);
  const auto thrown = ranks.outcomes([&](Rank r) {
    if (r == 1) {
      EXPECT_THROW(ranks.users()[1].check_failure(10), Aborted);
      return;
    }
    ranks.interrupt(0);
    EXPECT_THROW(ranks.call(0), Interrupted);
    EXPECT_THROW(ranks.call(0), Aborted);
  });
  for (const auto& each : thrown) EXPECT_FALSE(each);
}

TEST(GpuFaultMonitor, WhatWasNotCalledCannotBeCaptured) {
  Watched ranks(1);
  simulated_cuda_begin_capture(ranks.stream(0));
  EXPECT_THROW(ranks.call(0), InvalidArgument);
  simulated_cuda_free_graph(simulated_cuda_end_capture(ranks.stream(0)));
  ranks.call(0);
  ranks[0].finish(10);
  simulated_cuda_begin_capture(ranks.stream(0));
  ranks.call(0);
  simulated_cuda_free_graph(simulated_cuda_end_capture(ranks.stream(0)));
}

// A call of each rank, captured after it was made once.
std::vector<SimulatedGraph*> capture(Watched& ranks, int size) {
  std::vector<SimulatedGraph*> graphs(static_cast<std::size_t>(size));
  ranks.empty_calls();
  ranks.outcomes([&](Rank r) {
    ranks.call(r);
    ranks[r].finish(10);
    simulated_cuda_begin_capture(ranks.stream(r));
    ranks.call(r);
    ranks.fill_memory(r);
    graphs[static_cast<std::size_t>(r)] = simulated_cuda_end_capture(ranks.stream(r));
  });
  return graphs;
}

TEST(GpuFaultMonitor, ReplaysAreOverInTheEnd) {
  Watched ranks(2);
  const std::vector<SimulatedGraph*> graphs = capture(ranks, 2);
  const auto thrown = ranks.outcomes([&](Rank r) {
    for (int replay = 0; replay < 3; ++replay)
      simulated_cuda_launch_graph(graphs[static_cast<std::size_t>(r)], ranks.stream(r));
    OwnedEvent end(simulated_api());
    simulated_api().record(end.get(), ranks.stream(r));
    ranks[r].finish(60);
    int done = 0;
    simulated_api().query(end.get(), &done);
    EXPECT_EQ(done, 1);
  });
  for (const auto& each : thrown) EXPECT_FALSE(each);
  for (SimulatedGraph* each : graphs) simulated_cuda_free_graph(each);
}

// As where a rank has replayed it more often than another.
TEST(GpuFaultMonitor, ReplaysThatDoNotEndAreATimeout) {
  Watched ranks(2);
  const std::vector<SimulatedGraph*> graphs = capture(ranks, 2);
  const auto thrown = ranks.outcomes([&](Rank r) {
    if (r > 0) return;
    simulated_cuda_hang(1);
    simulated_cuda_launch_graph(graphs[0], ranks.stream(0));
    ranks[0].finish(0.5);
  });
  ASSERT_TRUE(thrown[0]);
  try {
    std::rethrow_exception(thrown[0]);
  } catch (const Timeout& error) {
    EXPECT_NE(std::string(error.what()).find("rank 0: timed out"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("replayed it as often"), std::string::npos);
  }
  simulated_cuda_hang(0);
  simulated_api().synchronize(ranks.stream(0));  // it uses the graph no more
  EXPECT_THROW(ranks.users()[1].check_failure(10), Timeout) << "the other rank is told";
  for (SimulatedGraph* each : graphs) simulated_cuda_free_graph(each);
}

// It would wait for messages that the other rank only captures.
TEST(GpuFaultMonitor, ACallThatIsCapturedOnOneRankAloneIsToldApart) {
  Watched ranks(2);
  ranks.empty_calls();
  SimulatedGraph* graph = nullptr;
  const auto thrown = ranks.outcomes([&](Rank r) {
    ranks.call(r);
    ranks[r].finish(10);
    if (r == 0) simulated_cuda_begin_capture(ranks.stream(r));
    ranks.call(r);
    if (r == 0) graph = simulated_cuda_end_capture(ranks.stream(r));
    ranks[r].finish(10);
  });
  for (const auto& each : thrown) {
    ASSERT_TRUE(each);
    try {
      std::rethrow_exception(each);
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("captured"), std::string::npos) << error.what();
    }
  }
  simulated_cuda_free_graph(graph);
}

TEST(GpuFaultMonitor, AllRanksAreToldToStopAfterTheSameCall) {
  Watched ranks(3);
  std::vector<int> first(3, -1);
  const auto thrown = ranks.outcomes([&](Rank r) {
    for (int call = 0; call < 12; ++call) {
      if (r == 1 && call == 4) ranks.users()[1].request_stop();
      ranks.call(r);
      auto& own = first[static_cast<std::size_t>(r)];
      if (ranks[r].should_stop() && own < 0) own = call;
    }
    ranks[r].finish(10);
  });
  for (const auto& each : thrown) EXPECT_FALSE(each);
  EXPECT_EQ(first, std::vector<int>(3, 4));
}

TEST(GpuFaultMonitor, TheUsersFailureEndsCalls) {
  Watched ranks(2);
  const auto thrown = ranks.outcomes([&](Rank r) {
    if (r == 1) return ranks.users()[1].abort("enough");
    ranks.call(0);
    ranks[0].finish(10);
  });
  expect_all<Aborted>(thrown, 1, 1);
}

}  // namespace
}  // namespace gradwire::cuda
