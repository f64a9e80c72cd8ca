// Calls that are captured in a CUDA graph: replays give what plain calls give, residuals included.
#include <gtest/gtest.h>

#include <barrier>
#include <random>

#include "cuda_ranks.h"
#include "gradwire/base/error.h"

namespace gradwire::cuda {
namespace {

constexpr std::size_t kElements = 700;

std::vector<float> input(Rank rank, int step) {
  std::mt19937 random(static_cast<unsigned>(1000 * step + rank));
  std::normal_distribution<float> normal;
  std::vector<float> x(kElements);
  for (float& each : x) each = normal(random);
  return x;
}

// One rank's array, residuals and call.
struct Job {
  Job(std::string_view name, Rank of)
      : rank(of),
        codec(codec::make_codec(name)),
        host(std::make_shared<codec::ErrorFeedback>()),
        feedback(simulated_api(), host),
        memory(std::make_unique<DeviceBytes>(kElements * sizeof(float))) {}

  void call(GpuCommunicator& comm, Stream stream) {
    const exec::Array array{memory->data(), kElements};
    exec::Request request;
    request.op = ReduceOp::kAvg;
    request.algorithm = "ring";
    request.codec = codec;
    request.keys = {&key, 1};
    request.inputs = request.outputs = {&array, 1};
    comm.run(request, &feedback, stream);
  }
  void put(int step, Stream stream) { memory->put(input(rank, step).data(), stream); }
  std::vector<float> result(Stream stream) const {
    std::vector<float> y(kElements);
    memory->get(y.data(), stream);
    return y;
  }
  std::vector<float> residual() {
    feedback.bring_home();
    std::vector<float> found = host->residual("key");
    feedback.send_back();
    return found;
  }

  Rank rank;
  std::shared_ptr<const codec::Codec> codec;
  std::shared_ptr<codec::ErrorFeedback> host;
  GpuFeedback feedback;
  std::unique_ptr<DeviceBytes> memory;
  codec::KeyedArray key{"key", kElements};
};

class Graphs : public testing::TestWithParam<std::string_view> {};

TEST_P(Graphs, AHundredReplaysAreAHundredCalls) {
  GpuRanks plain(1), captured(1);
  Job one(GetParam(), 0), other(GetParam(), 0);
  const Stream stream = captured.stream(0);
  for (int step = 0; step < 2; ++step) {  // a first call allocates
    one.put(step, plain.stream(0));
    one.call(plain[0], plain.stream(0));
    other.put(step, stream);
    other.call(captured[0], stream);
  }
  simulated_api().synchronize(stream);
  simulated_cuda_begin_capture(stream);
  other.call(captured[0], stream);
  SimulatedGraph* graph = simulated_cuda_end_capture(stream);
  ASSERT_NE(graph, nullptr);
  for (int step = 2; step < 102; ++step) {
    one.put(step, plain.stream(0));
    one.call(plain[0], plain.stream(0));
    other.put(step, stream);
    simulated_cuda_launch_graph(graph, stream);
    ASSERT_TRUE(exec::same_bits(one.result(plain.stream(0)), other.result(stream))) << step;
  }
  EXPECT_TRUE(exec::same_bits(one.residual(), other.residual()));
  simulated_cuda_free_graph(graph);
}

// All ranks' calls in one graph, which forks to their streams and joins them again.
TEST_P(Graphs, OfSeveralRanks) {
  constexpr int kRanks = 3;
  GpuRanks plain(kRanks), captured(kRanks);
  std::vector<std::unique_ptr<Job>> one, other;
  for (Rank r = 0; r < kRanks; ++r) {
    one.push_back(std::make_unique<Job>(GetParam(), r));
    other.push_back(std::make_unique<Job>(GetParam(), r));
  }
  const auto at = [](Rank r) { return static_cast<std::size_t>(r); };
  const auto step_of = [&](GpuRanks& ranks, auto& jobs, int step) {
    ranks.run([&](Rank r) {
      jobs[at(r)]->put(step, ranks.stream(r));
      simulated_api().synchronize(ranks.stream(r));
      jobs[at(r)]->call(ranks[r], ranks.stream(r));
      simulated_api().synchronize(ranks.stream(r));
    });
  };
  step_of(plain, one, 0);
  step_of(captured, other, 0);
  const Api& api = simulated_api();
  OwnedStream origin(api);
  OwnedEvent fork(api);
  std::vector<std::unique_ptr<OwnedEvent>> ends;
  simulated_cuda_begin_capture(origin.get());
  api.record(fork.get(), origin.get());
  for (Rank r = 0; r < kRanks; ++r) {
    ASSERT_EQ(api.wait(captured.stream(r), fork.get()), 0);
    ends.push_back(std::make_unique<OwnedEvent>(api));
  }
  captured.run([&](Rank r) {
    other[at(r)]->call(captured[r], captured.stream(r));
    api.record(ends[at(r)]->get(), captured.stream(r));
  });
  for (const auto& each : ends) ASSERT_EQ(api.wait(origin.get(), each->get()), 0);
  SimulatedGraph* graph = simulated_cuda_end_capture(origin.get());
  for (int step = 1; step < 6; ++step) {
    step_of(plain, one, step);
    for (Rank r = 0; r < kRanks; ++r) {
      other[at(r)]->put(step, captured.stream(r));
      api.synchronize(captured.stream(r));
    }
    simulated_cuda_launch_graph(graph, origin.get());
    api.synchronize(origin.get());
    for (Rank r = 0; r < kRanks; ++r)
      ASSERT_TRUE(exec::same_bits(one[at(r)]->result(plain.stream(r)),
                                  other[at(r)]->result(captured.stream(r))))
          << "rank " << r << " step " << step;
  }
  simulated_cuda_free_graph(graph);
}

TEST_P(Graphs, WhatIsNewCannotBeCaptured) {
  GpuRanks ranks(1);
  Job job(GetParam(), 0);
  job.put(0, ranks.stream(0));
  simulated_api().synchronize(ranks.stream(0));
  simulated_cuda_begin_capture(ranks.stream(0));
  EXPECT_THROW(job.call(ranks[0], ranks.stream(0)), InvalidArgument);
  simulated_cuda_free_graph(simulated_cuda_end_capture(ranks.stream(0)));
  job.call(ranks[0], ranks.stream(0));  // and it works afterwards
  simulated_api().synchronize(ranks.stream(0));
}

INSTANTIATE_TEST_SUITE_P(Codecs, Graphs,
                         testing::Values("none", "bf16", "int8:rounding=stochastic", "onebit",
                                         "threshold"));

// A repeated call neither waits for the device nor allocates.
TEST(GpuCalls, RepeatedOnesWaitForNothing) {
  GpuRanks ranks(2);
  std::vector<std::unique_ptr<Job>> jobs;
  for (Rank r = 0; r < 2; ++r) jobs.push_back(std::make_unique<Job>("onebit", r));
  const auto call = [&] {
    ranks.run([&](Rank r) { jobs[static_cast<std::size_t>(r)]->call(ranks[r], ranks.stream(r)); });
  };
  for (Rank r = 0; r < 2; ++r) jobs[static_cast<std::size_t>(r)]->put(0, ranks.stream(r));
  call();
  call();
  const auto waits = simulated_cuda_waits(), allocations = simulated_cuda_allocations();
  for (int i = 0; i < 5; ++i) call();
  EXPECT_EQ(simulated_cuda_waits(), waits);
  EXPECT_EQ(simulated_cuda_allocations(), allocations);
}

// Steps on one stream, and on another one each: the same residuals.
TEST(GpuCalls, StepsAreInOrderOnWhateverStreams) {
  std::vector<std::vector<float>> residuals[2];
  for (int moves = 0; moves < 2; ++moves) {
    GpuRanks ranks(2);
    residuals[moves].resize(2);
    ranks.run([&](Rank r) {
      OwnedStream other(simulated_api());
      Job job("onebit", r);
      auto memory = std::make_unique<DeviceBytes>(kElements * sizeof(float));
      for (int step = 0; step < 20; ++step) {
        const Stream stream = moves == 1 && step % 2 == 1 ? other.get() : ranks.stream(r);
        std::swap(job.memory, memory);  // of one stream each: their order is the caller's to keep
        job.put(step, stream);
        job.feedback.begin_step();
        job.call(ranks[r], stream);
        job.feedback.end_step(/*keep=*/step % 3 != 0, stream);
      }
      residuals[moves][static_cast<std::size_t>(r)] = job.residual();
      simulated_api().synchronize(ranks.stream(r));
      simulated_api().synchronize(other.get());
    });
  }
  for (std::size_t r = 0; r < 2; ++r)
    EXPECT_TRUE(exec::same_bits(residuals[0][r], residuals[1][r])) << "rank " << r;
}

// The stream of the last call is that of the capture, where nothing runs.
TEST(GpuCalls, ResidualsAreReadBehindReplaysOnWhateverStream) {
  GpuRanks plain(1), captured(1);
  Job one("onebit", 0), other("onebit", 0);
  one.put(0, plain.stream(0));
  one.call(plain[0], plain.stream(0));
  other.put(0, captured.stream(0));
  other.call(captured[0], captured.stream(0));
  simulated_api().synchronize(captured.stream(0));
  simulated_cuda_begin_capture(captured.stream(0));
  other.call(captured[0], captured.stream(0));
  SimulatedGraph* graph = simulated_cuda_end_capture(captured.stream(0));
  OwnedStream replays(simulated_api());
  const DeviceBytes busy(4);
  for (int step = 1; step < 10; ++step) {
    one.put(step, plain.stream(0));
    one.call(plain[0], plain.stream(0));
    other.put(step, replays.get());
    for (int i = 0; i < 50; ++i) simulated_api().fill(busy.data(), i, 4, replays.get());
    simulated_cuda_launch_graph(graph, replays.get());
    const std::vector<float> found = other.residual();
    ASSERT_TRUE(exec::same_bits(one.residual(), found)) << step;
  }
  simulated_cuda_free_graph(graph);
}

// What is enqueued when the messages fail is over all the same, with whatever came.
TEST(GpuCalls, AFailureLeavesResidualsAsTheyWere) {
  for (const bool in_step : {false, true}) {
    GpuRanks ranks(2);
    std::barrier all_called(2), all_aborted(2);
    ranks.run([&](Rank r) {
      const Stream stream = ranks.stream(r);
      Job job("onebit", r);
      job.put(0, stream);
      job.call(ranks[r], stream);
      const std::vector<float> before = job.residual();
      job.put(1, stream);
      if (in_step) job.feedback.begin_step();
      job.call(ranks[r], stream);
      all_called.arrive_and_wait();
      ranks[r].abort();
      all_aborted.arrive_and_wait();
      if (in_step) job.feedback.end_step(/*keep=*/true, stream);
      EXPECT_TRUE(exec::same_bits(job.residual(), before)) << "rank " << r;
    });
  }
}

TEST(GpuCalls, EndBeforeTheirCommunicatorIsGone) {
  DeviceBytes memory[] = {DeviceBytes(4), DeviceBytes(4)};
  const OwnedStream streams[] = {OwnedStream(simulated_api()), OwnedStream(simulated_api())};
  Loopback loopback(simulated_api(), 2);
  std::vector<std::jthread> threads;
  for (Rank r = 0; r < 2; ++r)
    threads.emplace_back([&, r] {
      const float one = 1;
      memory[r].put(&one, streams[r].get());
      GpuCommunicator comm(simulated_api(), {r, 2, {}, 0}, loopback.endpoint(r, 10));
      const exec::Array array{memory[r].data(), 1};
      exec::Request request;
      request.algorithm = "ring";
      request.inputs = request.outputs = {&array, 1};
      comm.run(request, nullptr, streams[r].get());
    });
  threads.clear();
  for (const DeviceBytes& each : memory)  // which is the host's here, and nobody waits for it
    EXPECT_EQ(*reinterpret_cast<const float*>(each.data()), 2);
}

TEST(GpuCalls, ADeviceThatHangsDoesNotHoldUpTheEnd) {
  simulated_cuda_hang(1);
  DeviceBytes memory(4);
  const OwnedStream stream(simulated_api());
  Loopback loopback(simulated_api(), 1);
  {
    GpuCommunicator comm(simulated_api(), {0, 1, {}, 0}, loopback.endpoint(0, 10));
    simulated_api().fill(memory.data(), 0, 4, stream.get());
  }
  simulated_cuda_hang(0);
  await_device(simulated_api());
}

}  // namespace
}  // namespace gradwire::cuda
