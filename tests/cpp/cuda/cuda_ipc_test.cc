// Messages and all_reduces by mapped memory: they give the bits of CPUs, however long they are and
// however many share their staging; and their kernels end when a rank never comes.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <string>
#include <thread>
#include <vector>

#include "cuda_cases.h"
#include "gradwire/base/error.h"

namespace gradwire::cuda {
namespace {

constexpr std::uint64_t kNever = 0, kAlways = ~std::uint64_t{0};

class Ipc : public testing::TestWithParam<int> {
 protected:
  static GpuRanks ranks(int p, std::uint64_t one_shot_bytes = IpcMessages::kOneShotBytes) {
    return GpuRanks(ipc_messages(simulated_api(), p, one_shot_bytes));
  }
};

void expect_same_over(GpuRanks& ranks, const Case& of, const std::string& what) {
  expect_same(on_gpus(of, ranks), on_cpus(of), what);
}

Case plain(DType dtype, ReduceOp op, int p, std::size_t n) {
  Case of = arrays_for(Collective::kAllReduce, dtype, p, 0, n);
  of.request.op = op;
  of.request.algorithm = "direct";
  return of;
}

// Of every so many elements one stays as it is, and the others become 0.
void leave_zeros(Case& of, std::size_t every) {
  for (auto& rank : of.inputs)
    for (auto& array : rank)
      for (std::size_t i = 0; i < array.size() / sizeof(float); ++i)
        if (i % every != 0) reinterpret_cast<float*>(array.data())[i] = 0;
}

// Lengths below, at and above a tile and all blocks' tiles.
TEST_P(Ipc, AllReducesGiveTheBitsOfDirect) {
  const int p = GetParam();
  for (const std::uint64_t one_shot_bytes : {kAlways, kNever}) {
    GpuRanks gpus = ranks(p, one_shot_bytes);
    for (const std::size_t n : {0, 1, 3, 256, 1001, 9000})
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kUInt8})
        for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg}) {
          if (!is_defined(op, dtype)) continue;
          Case of = plain(dtype, op, p, n);
          of.in_place = n % 2 == 0;
          of.calls = 2;
          expect_same_over(gpus, of, label(of, "direct") + " n=" + std::to_string(n));
        }
  }
}

TEST_P(Ipc, AllReducesOfEveryDtypeAndOp) {
  const int p = GetParam();
  if (p != 3) return;
  for (const std::uint64_t one_shot_bytes : {kAlways, kNever}) {
    GpuRanks gpus = ranks(p, one_shot_bytes);
    for (int d = 0; d < kDTypes; ++d)
      for (int o = 0; o < kReduceOps; ++o) {
        const Case of = plain(static_cast<DType>(d), static_cast<ReduceOp>(o), p, 333);
        if (is_defined(of.request.op, of.request.dtype))
          expect_same_over(gpus, of, label(of, "direct"));
      }
  }
}

TEST_P(Ipc, AllReducesOfManyArraysAtOddPlaces) {
  const int p = GetParam();
  for (const std::uint64_t one_shot_bytes : {kAlways, kNever})
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      GpuRanks gpus = ranks(p, one_shot_bytes);
      Case of = many_arrays("", "direct", p, dtype, /*is_finite=*/dtype != DType::kFloat32);
      of.keys.clear();
      expect_same_over(gpus, of, label(of, "direct") + ", many arrays");
    }
}

TEST_P(Ipc, EveryCollectiveAndCodecGivesTheBitsOfCpus) {
  const int p = GetParam();
  GpuRanks gpus = ranks(p);
  for (int c = 0; c < kCollectives; ++c) {
    const auto collective = static_cast<Collective>(c);
    for (std::string_view algorithm :
         {schedule::algorithms(collective).front(), schedule::algorithms(collective).back()}) {
      Case of = arrays_for(collective, DType::kFloat32, p, 0, 1001);
      of.request.algorithm = algorithm;
      expect_same_over(gpus, of, label(of, algorithm));
    }
  }
  for (std::string_view codec : {"none", "fp16", "int8", "onebit", "threshold", "topk"})
    for (std::string_view algorithm : {"ring", "direct", "gather"}) {
      const bool is_long = codec == "threshold" || codec == "topk";
      if ((algorithm == "ring" && codec != "onebit") ||
          (is_long && (p > 2 || algorithm != "direct")))
        continue;
      const Case of = coded(codec, Collective::kAllReduce, algorithm, p, 2100, true);
      expect_same_over(gpus, of, label(of, algorithm));
    }
}

// In one kernel: residuals, averages, scales, values beyond the limit, NaN, and odd places.
TEST_P(Ipc, AllReducesInCastsGiveTheBitsOfDirect) {
  const int p = GetParam();
  GpuRanks gpus = ranks(p);
  for (std::string_view codec : {"fp16", "bf16", "fp16:scale=1024"}) {
    for (const bool feedback : {true, false})
      for (const std::size_t n : {1, 1001, 4000}) {
        Case of = coded(codec, Collective::kAllReduce, "direct", p, n, feedback);
        of.inputs[0][0] = bytes_of(std::vector<float>(n, 7e4F));
        of.in_place = n == 1001;
        if (!feedback) of.request.op = ReduceOp::kSum;
        expect_same_over(gpus, of, label(of, "direct") + " n=" + std::to_string(n));
      }
    for (const bool is_finite : {true, false})
      expect_same_over(gpus, many_arrays(codec, "direct", p, DType::kFloat32, is_finite),
                       std::string(codec) + ", many arrays");
  }
}

// In one kernel: residuals, averages, random rounding, huge values, NaN, blocks that one warp takes
// and those that all take, and odd places.
TEST_P(Ipc, AllReducesInInt8GiveTheBitsOfDirect) {
  const int p = GetParam();
  for (std::string_view codec :
       {"int8", "int8:rounding=stochastic,seed=5", "int8:block=96", "int8:block=4000"}) {
    for (const bool feedback : {true, false})
      for (const std::size_t n : {1, 1001, 9000}) {
        Case of = coded(codec, Collective::kAllReduce, "direct", p, n, feedback);
        if (n == 1) of.inputs[0][0] = bytes_of(std::vector<float>(n, 3e38F));
        of.in_place = n == 1001;
        if (!feedback) of.request.op = ReduceOp::kSum;
        GpuRanks gpus = ranks(p);  // whose number of calls without feedback decides the rounding
        expect_same_over(gpus, of, label(of, "direct") + " n=" + std::to_string(n));
      }
    GpuRanks gpus = ranks(p);
    for (const bool is_finite : {true, false})
      expect_same_over(gpus, many_arrays(codec, "direct", p, DType::kFloat32, is_finite),
                       std::string(codec) + ", many arrays");
  }
}

// In one kernel: residuals, averages, masks as bits and as runs, huge values, and blocks that one
// warp takes and those that all take.
TEST_P(Ipc, AllReducesInOneBitGiveTheBitsOfDirect) {
  const int p = GetParam();
  GpuRanks gpus = ranks(p);
  for (std::string_view codec : {"onebit", "onebit:block=64", "onebit:block=2496"}) {
    for (const std::size_t n : {1, 1001, 3000}) {
      const bool feedback = n != 1001;
      Case of = coded(codec, Collective::kAllReduce, "direct", p, n, feedback);
      leave_zeros(of, feedback ? 3 : 50);
      if (n == 1) of.inputs[0][0] = bytes_of(std::vector<float>(n, 3e38F));
      of.in_place = !feedback;
      if (!feedback) of.request.op = ReduceOp::kSum;
      expect_same_over(gpus, of, label(of, "direct") + " n=" + std::to_string(n));
    }
    const bool is_finite = codec != "onebit";
    expect_same_over(gpus, many_arrays(codec, "direct", p, DType::kFloat32, is_finite),
                     std::string(codec) + ", many arrays");
  }
}

// The largest block of all, and values that are not finite: in one rank's own part, and in a part
// that it sends.
TEST_P(Ipc, AllReducesInOneBitOfBlocksThatAreNotFinite) {
  const int p = GetParam();
  GpuRanks gpus = ranks(p);
  for (const float value : {INFINITY, -INFINITY, NAN})
    for (const Rank rank : {0, p - 1}) {
      const std::size_t n = 20000;
      Case of = coded("onebit:block=8192", Collective::kAllReduce, "direct", p, n, true);
      auto* const x = reinterpret_cast<float*>(of.inputs[static_cast<std::size_t>(rank)][0].data());
      x[17] = value;
      of.calls = 2;
      expect_same_over(gpus, of, "rank " + std::to_string(rank) + ", " + std::to_string(value));
    }
}

// Whose units do not fit into staging's tiles: beside messages.
TEST_P(Ipc, AllReducesInLargeBlocksGiveTheBitsOfDirect) {
  const int p = GetParam();
  GpuRanks gpus = ranks(p);
  const Case of = coded("int8:block=8192", Collective::kAllReduce, "direct", p, 20000, true);
  expect_same_over(gpus, of, label(of, "direct"));
}

// Kernels of one rank run long before those of another, calls take the same staging again, and
// messages and all_reduces of all kinds take turns.
TEST_P(Ipc, ManyCallsShareTheStaging) {
  const int p = GetParam();
  for (const std::uint64_t seed : {1, 2, 3}) {
    simulated_cuda_seed(seed);
    GpuRanks gpus = ranks(p, 12000);  // some in one shot, others in two
    std::vector<std::vector<float>> found(static_cast<std::size_t>(p));
    constexpr std::size_t kMost = 3000;
    gpus.run([&](Rank rank) {
      const Stream stream = gpus.stream(rank);
      DeviceBytes memory(kMost * sizeof(float));
      memory.put(std::vector<float>(kMost, 1.0F).data(), stream);
      for (int call = 0; call < 12; ++call) {
        const exec::Array array{memory.data(), call % 3 == 0 ? kMost : 500};
        exec::Request request;
        request.op = ReduceOp::kAvg;
        request.algorithm = call % 4 == 3 ? "ring" : "direct";
        if (call % 4 == 1) request.codec = codec::make_codec("onebit");
        request.inputs = request.outputs = {&array, 1};
        gpus[rank].run(request, nullptr, stream);
        if (rank == call % p) simulated_api().synchronize(stream);
      }
      auto& its = found[static_cast<std::size_t>(rank)];
      its.resize(kMost);
      memory.get(its.data(), stream);
    });
    for (const auto& each : found) EXPECT_EQ(each, std::vector<float>(kMost, 1.0F));
  }
}

// Counters are on the device, so that each rank may replay a graph of its own.
TEST_P(Ipc, GraphsCanBeReplayed) {
  const int p = GetParam();
  GpuRanks gpus = ranks(p);
  std::vector<float> found(static_cast<std::size_t>(p));
  std::vector<SimulatedGraph*> graphs(static_cast<std::size_t>(p));
  std::vector<std::unique_ptr<DeviceBytes>> memory;
  for (int r = 0; r < p; ++r) memory.push_back(std::make_unique<DeviceBytes>(4000));
  const auto call = [&](Rank rank) {
    for (std::string_view kind : {"direct", "ring", "onebit"}) {
      const exec::Array array{memory[static_cast<std::size_t>(rank)]->data(), 1000};
      exec::Request request;
      request.algorithm = kind == "ring" ? "ring" : "direct";
      if (kind == "onebit") request.codec = codec::make_codec("onebit");
      request.inputs = request.outputs = {&array, 1};
      gpus[rank].run(request, nullptr, gpus.stream(rank));
    }
  };
  gpus.run([&](Rank rank) {
    call(rank);
    simulated_api().synchronize(gpus.stream(rank));
  });
  gpus.run([&](Rank rank) {
    simulated_cuda_begin_capture(gpus.stream(rank));
    call(rank);
    graphs[static_cast<std::size_t>(rank)] = simulated_cuda_end_capture(gpus.stream(rank));
  });
  gpus.run([&](Rank rank) {
    const auto me = static_cast<std::size_t>(rank);
    const Stream stream = gpus.stream(rank);
    memory[me]->put(std::vector<float>(1000, 1.0F).data(), stream);
    for (int replay = 0; replay < 3; ++replay) simulated_cuda_launch_graph(graphs[me], stream);
    std::vector<float> its(1000);
    memory[me]->get(its.data(), stream);
    found[me] = its[999];
    simulated_cuda_free_graph(graphs[me]);
  });
  EXPECT_EQ(found,
            std::vector<float>(static_cast<std::size_t>(p), std::pow(static_cast<float>(p), 9.0F)));
}

INSTANTIATE_TEST_SUITE_P(Ranks, Ipc, testing::Values(2, 3, 4));

// A kernel that waits ends when its rank aborts, and says first that its bytes never came.
TEST(IpcFaults, AnAbortEndsKernelsThatWait) {
  const Api& api = simulated_api();
  const OwnedStream stream(api);
  DeviceBytes memory(64), other(64);
  std::uint32_t lost = 0;
  auto messages = ipc_messages(api, 2);
  messages[0]->tell_losses(&lost);
  messages[0]->begin();
  messages[0]->receive(memory.data(), 64, 1);
  messages[0]->end(stream.get());
  const SummedRun run{other.data(), other.data(), 16, 0};
  messages[0]->reduce({&run, 1}, {}, stream.get());
  const Staging& staging = *messages[0]->staging();
  EXPECT_EQ(api.onebit_reduce(staging, 1024, &run, 1, 1, nullptr, stream.get()), 0);
  OwnedEvent end(api);
  api.record(end.get(), stream.get());
  int done = 1;
  api.query(end.get(), &done);
  EXPECT_EQ(done, 0);
  messages[0]->abort();
  api.synchronize(stream.get());
  EXPECT_EQ(lost, kLost);
  EXPECT_THROW(messages[0]->check(), Aborted);
  EXPECT_THROW(messages[0]->begin(), Aborted);
}

TEST(IpcStaging, IsUsedAgainOnceAllHaveEnded) {
  const Api& api = simulated_api();
  ipc_messages(api, 3).clear();
  const std::uint64_t before = simulated_cuda_allocations();
  auto messages = ipc_messages(api, 3);
  EXPECT_EQ(simulated_cuda_allocations(), before + 3) << "not only the pinned words";
  auto last = std::move(messages.back());
  messages.clear();  // while the last rank still maps it
  auto more = ipc_messages(api, 3);
  EXPECT_EQ(simulated_cuda_allocations(), before + 9) << "it was used while others had it";
  last.reset();
  more.clear();
  ipc_messages(api, 3).clear();
  EXPECT_EQ(simulated_cuda_allocations(), before + 12);
}

// A set-up that fails on one rank, before or after others have mapped its memory.
TEST(IpcStaging, OfASetUpThatFailsIsUsedAgain) {
  const Api& api = simulated_api();
  ipc_messages(api, 2).clear();
  ipc_messages(api, 2).clear();  // what others had before is free by now
  const std::uint64_t before = simulated_cuda_allocations();
  for (int again = 0; again < 3; ++again) {
    auto own = std::make_unique<OwnStaging>(api, 2), failed = std::make_unique<OwnStaging>(api, 2);
    const StagingAddress all[] = {own->address(), failed->address()};
    const IpcMessages mapped(api, 0, std::move(own), all);
    failed.reset();
  }
  EXPECT_EQ(simulated_cuda_allocations(), before + 3) << "not only the pinned words";
}

// Where ranks have parted, nobody reads the memory of the others, whose processes may have ended.
TEST(IpcStaging, OfRanksThatHavePartedIsFreeAtOnce) {
  const Api& api = simulated_api();
  auto messages = ipc_messages(api, 3);
  std::vector<std::unique_ptr<OwnStaging>> spare;  // all that other tests have left
  std::uint64_t before = simulated_cuda_allocations();
  while (simulated_cuda_allocations() == before)
    spare.push_back(std::make_unique<OwnStaging>(api, 3));
  before = simulated_cuda_allocations();
  for (auto& each : messages) each->part();
  const auto last = std::move(messages.back());
  messages.clear();
  const OwnStaging one(api, 3), other(api, 3);
  EXPECT_EQ(simulated_cuda_allocations(), before);
}

TEST(IpcStaging, IsForFewRanks) {
  EXPECT_THROW(OwnStaging(simulated_api(), kMostMapped + 1), InvalidArgument);
}

// CUDA exports blocks of 2 MiB: no other memory may be in one.
TEST(IpcStaging, IsWholeBlocks) {
  for (int size = 2; size <= kMostMapped; ++size)
    EXPECT_EQ(simulated_api().staging_bytes(size) % (2U << 20), 0) << size;
}

TEST(IpcStaging, OfADeviceThatDoesNotExportItIsRefused) {
  const Api& api = simulated_api();
  auto own = std::make_unique<OwnStaging>(api, 2);
  StagingAddress other = own->address();
  other.process ^= 2;
  other.is_exported = 0;
  const StagingAddress all[] = {own->address(), other};
  try {
    IpcMessages(api, 0, std::move(own), all);
    FAIL() << "it was mapped";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("rank 1"), std::string::npos) << error.what();
  }
}

bool is_over(const Api& api, Stream stream) {
  const OwnedEvent end(api);
  api.record(end.get(), stream);
  int done = 0;
  for (int i = 0; i < 50 && done == 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    api.query(end.get(), &done);
  }
  return done != 0;
}

// A rank that aborts as it waits for another one, whose kernels come later: these must not take
// what the first rank's next kernels would write and tell for what they wait for.
struct Late {
  explicit Late(std::uint64_t count)
      : n(count), in(count), out(count), bytes{DeviceBytes{4 * count}, DeviceBytes{4 * count}} {}
  // Enqueues start(rank, in, out, stream) with inputs of `value`.
  template <typename Start>
  void call(int rank, float value, Start start) {
    const auto r = static_cast<std::size_t>(rank);
    std::ranges::fill(in, value);
    inputs.emplace_back(4 * n).put(in.data(), copies.get());
    start(rank, inputs.back().data(), bytes[r].data(), streams[r].get());
  }
  const std::vector<float>& got(int rank) {
    bytes[static_cast<std::size_t>(rank)].get(out.data(), copies.get());
    return out;
  }

  std::uint64_t n;
  std::vector<float> in, out;
  std::deque<DeviceBytes> inputs;
  OwnedStream copies{simulated_api()};
  OwnedStream streams[2] = {OwnedStream(simulated_api()), OwnedStream(simulated_api())};
  DeviceBytes bytes[2];
};

template <typename Start>
void expect_nothing_told(std::uint64_t n, const std::vector<std::unique_ptr<Messages>>& messages,
                         const std::string& what, Start start) {
  const Api& api = simulated_api();
  Late late(n);
  for (int rank : {0, 1}) late.call(rank, 10, start);
  for (const OwnedStream& each : late.streams) api.synchronize(each.get());
  late.call(0, 1, start);
  messages[0]->abort();
  api.synchronize(late.streams[0].get());
  late.call(1, 2, start);
  EXPECT_FALSE(is_over(api, late.streams[1].get())) << what;
  late.call(0, 100, start);
  api.synchronize(late.streams[0].get());
  EXPECT_FALSE(is_over(api, late.streams[1].get())) << what;
  messages[1]->abort();
  api.synchronize(late.streams[1].get());
  for (float each : late.got(1)) ASSERT_LE(each, 20) << what << ": from a later call";
}

// The last one: it leaves staging, which tests of that would find.
TEST(IpcLate, NothingIsToldAfterAKernelThatEnded) {
  constexpr std::uint64_t kCount = 2048;  // two blocks of onebit
  const Api& api = simulated_api();
  const auto runs = [](std::byte* x, std::byte* y) {
    return std::vector<SummedRun>{{x, y, kCount / 2, 0},
                                  {x + 2 * kCount, y + 2 * kCount, kCount / 2, 1}};
  };
  auto messages = ipc_messages(api, 2);
  expect_nothing_told(kCount, messages, "onebit", [&](int rank, auto* x, auto* y, Stream stream) {
    const auto both = runs(x, y);
    const Staging& staging = *messages[static_cast<std::size_t>(rank)]->staging();
    ASSERT_EQ(api.onebit_reduce(staging, 1024, both.data(), 2, 1, nullptr, stream), 0);
  });
  messages = ipc_messages(api, 2);
  expect_nothing_told(kCount, messages, "sum", [&](int rank, auto* x, auto* y, Stream stream) {
    const auto both = runs(x, y);
    const Staging& staging = *messages[static_cast<std::size_t>(rank)]->staging();
    ASSERT_EQ(api.reduce_staged(staging, static_cast<int>(DType::kFloat32),
                                static_cast<int>(ReduceOp::kSum), both.data(), 2, 1, false, stream),
              0);
  });
  messages = ipc_messages(api, 2);
  expect_nothing_told(65536, messages, "exchange", [&](int rank, auto* x, auto* y, Stream stream) {
    const StagedMessage both[] = {{x, 4 * 65536, 1 - rank, true}, {y, 4 * 65536, 1 - rank, false}};
    const Staging& staging = *messages[static_cast<std::size_t>(rank)]->staging();
    ASSERT_EQ(api.exchange(staging, both, 2, stream), 0);
  });
}

}  // namespace
}  // namespace gradwire::cuda
