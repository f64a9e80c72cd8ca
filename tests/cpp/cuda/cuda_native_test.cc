// Calls by NCCL's own collectives, over a fake NCCL that adds up in the order of the ranks: which
// calls they make, and that what they give is what schedules give.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "cuda_nccl_ranks.h"
#include "cuda_ranks.h"
#include "gradwire/base/error.h"
#include "gradwire/cuda/gpu_native.h"
#include "gradwire/cuda/messages/messages_nccl.h"

namespace gradwire::cuda {
namespace {

constexpr int kRanks = 3;

// Whole numbers, whose sums are exact in any order.
std::vector<std::byte> numbers(std::size_t count, int rank) {
  std::vector<float> made(count);
  for (std::size_t i = 0; i < count; ++i)
    made[i] = static_cast<float>(static_cast<int>(i * 7 % 50) - 20 + rank);
  return bytes_of(made);
}

class NativeCalls : public testing::Test {
 protected:
  NativeCalls() {
    fake.reset();
    fake.copy_by(&simulated_api());
    ::setenv("GRADWIRE_NCCL_SO", GRADWIRE_FAKE_NCCL, 1);
  }
  ~NativeCalls() override {
    EXPECT_EQ(fake.calls("misuse"), 0);
    EXPECT_EQ(fake.alive(), 0);
    fake.reset();
  }

  static Outcome over_nccl(const Case& of) {
    GpuRanks ranks(nccl_messages(Nccl::load(), static_cast<int>(of.inputs.size())));
    return on_gpus(of, ranks);
  }

  // The call's results by "nccl" and by "auto" are those of CPUs, and `name` was called.
  void expect_native(Case of, const char* name) {
    const Outcome wanted = on_cpus(of);
    int calls = 0;
    for (const char* algorithm : {"auto", "nccl"}) {
      of.request.algorithm = algorithm;
      const Outcome got = over_nccl(of);
      calls += kRanks * of.calls * static_cast<int>(arrays(of));
      EXPECT_EQ(fake.calls(name), calls) << algorithm;
      EXPECT_EQ(fake.calls("ncclSend"), 0);
      for (std::size_t r = 0; r < got.results.size(); ++r)
        EXPECT_EQ(got.results[r], wanted.results[r]) << algorithm << ", rank " << r;
      for (std::size_t r = 0; r < got.kept.size(); ++r)
        EXPECT_EQ(got.kept[r].size(), wanted.kept[r].size());
    }
  }
  static std::size_t arrays(const Case& of) {
    const bool blocks = of.request.collective == Collective::kReduceScatter ||
                        of.request.collective == Collective::kAllGather;
    return blocks ? 1 : of.inputs.front().size();
  }

  const FakeNccl& fake = fake_nccl();
};

Case same_for_all(Collective collective, std::vector<std::size_t> counts) {
  Case of;
  of.request.collective = collective;
  for (int r = 0; r < kRanks; ++r) {
    of.inputs.emplace_back();
    of.outputs.emplace_back();
    for (std::size_t count : counts) {
      of.inputs.back().push_back(numbers(count, r));
      of.outputs.back().push_back(count * sizeof(float));
    }
  }
  return of;
}

TEST_F(NativeCalls, AllReduce) {
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg}) {
    fake.reset();
    fake.copy_by(&simulated_api());
    Case of = same_for_all(Collective::kAllReduce, {1001, 1, 64});
    of.request.op = op;
    expect_native(of, "ncclAllReduce");
  }
}

TEST_F(NativeCalls, AllReduceInPlaceRepeated) {
  Case of = same_for_all(Collective::kAllReduce, {1001});
  of.in_place = true;
  of.calls = 3;
  expect_native(of, "ncclAllReduce");
}

TEST_F(NativeCalls, ReduceAndBroadcastFromARoot) {
  Case reduce = same_for_all(Collective::kReduce, {100});
  Case broadcast = same_for_all(Collective::kBroadcast, {100});
  reduce.request.root = broadcast.request.root = 1;
  for (const std::size_t other : {0, 2}) {
    reduce.outputs[other].clear();
    broadcast.inputs[other].clear();
  }
  const Outcome wanted = on_cpus(reduce), sent = on_cpus(broadcast);
  for (const char* algorithm : {"auto", "nccl"}) {
    reduce.request.algorithm = broadcast.request.algorithm = algorithm;
    EXPECT_EQ(over_nccl(reduce).results, wanted.results);
    EXPECT_EQ(over_nccl(broadcast).results, sent.results);
  }
  EXPECT_EQ(fake.calls("ncclReduce"), 2 * kRanks);
  EXPECT_EQ(fake.calls("ncclBroadcast"), 2 * kRanks);
}

// Blocks are arrays of their own here, so they pass through the scratch.
TEST_F(NativeCalls, ReduceScatterAndAllGather) {
  Case scatter = same_for_all(Collective::kReduceScatter, {40, 40, 40});
  Case gather = same_for_all(Collective::kAllGather, {40});
  for (int r = 0; r < kRanks; ++r) {
    scatter.outputs[static_cast<std::size_t>(r)] = {40 * sizeof(float)};
    gather.outputs[static_cast<std::size_t>(r)].assign(kRanks, 40 * sizeof(float));
  }
  expect_native(scatter, "ncclReduceScatter");
  expect_native(gather, "ncclAllGather");
}

TEST_F(NativeCalls, ResidualsAreDelivered) {
  Case of = same_for_all(Collective::kAllReduce, {100, 30});
  of.keys = {{"a", 100}, {"b", 30}};
  of.calls = 2;
  expect_native(of, "ncclAllReduce");
}

TEST_F(NativeCalls, OfWhatNcclHasNot) {
  Case of = same_for_all(Collective::kAllReduce, {8});
  of.request.op = ReduceOp::kMax;  // NaN
  of.request.algorithm = "auto";
  EXPECT_EQ(over_nccl(of).results, on_cpus(of).results) << "a schedule";
  EXPECT_EQ(fake.calls("ncclAllReduce"), 0);
  of.request.algorithm = "nccl";
  EXPECT_THROW(over_nccl(of), ScheduleError);
  of.request.op = ReduceOp::kSum;
  of.codec = "fp16";
  EXPECT_THROW(over_nccl(of), ScheduleError);
  of.codec = "";
  EXPECT_THROW(on_gpus(of), ScheduleError) << "over loopback";
}

TEST_F(NativeCalls, AFailureEndsAsThatOfAMessage) {
  fake.fail("ncclAllReduce", nccl::kSystemError, 0);
  Case of = same_for_all(Collective::kAllReduce, {8});
  of.request.algorithm = "nccl";
  EXPECT_THROW(over_nccl(of), TransportError);
}

}  // namespace
}  // namespace gradwire::cuda
