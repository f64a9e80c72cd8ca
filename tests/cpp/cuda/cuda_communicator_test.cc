// Calls on a GPU give the bits of the same calls on CPUs: every collective, schedule and codec.
#include <gtest/gtest.h>

#include <atomic>
#include <limits>

#include "cuda_cases.h"
#include "gradwire/schedule/generators.h"

namespace gradwire::cuda {
namespace {

constexpr int kSizes[] = {1, 2, 3, 4, 5, 8};

void expect_same(const Case& of, const std::string& what) {
  const Outcome cpu = on_cpus(of);
  expect_same(on_gpus(of), cpu, what);
}

class GpuCollectives : public testing::TestWithParam<int> {};

TEST_P(GpuCollectives, EveryAlgorithmGivesTheBitsOfTheCpu) {
  const int p = GetParam();
  for (int c = 0; c < kCollectives; ++c) {
    const auto collective = static_cast<Collective>(c);
    auto algorithms = schedule::algorithms(collective);
    if (collective == Collective::kAllReduce) algorithms.push_back("gather");
    for (std::string_view algorithm : algorithms)
      for (std::size_t n : {std::size_t{0}, std::size_t{1}, std::size_t{1001}}) {
        Case of = arrays_for(collective, DType::kFloat32, p, p / 2, n);
        if (collective != Collective::kReduce && collective != Collective::kBroadcast &&
            collective != Collective::kGather && collective != Collective::kScatter)
          of.request.root = 0;
        of.request.algorithm = algorithm;
        expect_same(of, label(of, algorithm));
      }
  }
}

TEST_P(GpuCollectives, EveryDtypeAndOp) {
  const int p = GetParam();
  for (int d = 0; d < kDTypes; ++d)
    for (int o = 0; o < kReduceOps; ++o) {
      Case of = arrays_for(Collective::kAllReduce, static_cast<DType>(d), p, 0, 333);
      of.request.op = static_cast<ReduceOp>(o);
      if (!is_defined(of.request.op, of.request.dtype)) continue;
      for (std::string_view algorithm : {"ring", "recursive_doubling", "gather", "direct"}) {
        of.request.algorithm = algorithm;
        expect_same(of, label(of, algorithm));
      }
    }
}

TEST_P(GpuCollectives, InPlaceAndHierarchical) {
  const int p = GetParam();
  Case of = arrays_for(Collective::kAllReduce, DType::kFloat32, p, 0, 5000);
  of.in_place = true;
  of.hosts = exec::two_hosts(p);
  for (std::string_view algorithm : {"hierarchical(ring,direct)", "ring"}) {
    of.request.algorithm = algorithm;
    expect_same(of, label(of, algorithm));
  }
}

// Tries only a few cases with many ranks: the simulated device takes long.
bool is_tried(std::string_view codec, std::string_view algorithm, int p) {
  if (p <= 3) return p != 2 || algorithm != "binary_tree";
  return algorithm == "ring" && (codec == "int8" || codec == "onebit" || codec == "threshold");
}

TEST_P(GpuCollectives, EveryCodecOnItsSchedules) {
  const int p = GetParam();
  for (std::string_view codec : kCodecs)
    for (std::string_view algorithm :
         {"ring", "direct", "binary_tree", "halving_doubling", "gather"}) {
      if (!is_tried(codec, algorithm, p)) continue;
      const Case of = coded(codec, Collective::kAllReduce, algorithm, p, 2100, true);
      expect_same(of, label(of, algorithm));
    }
}

TEST(GpuCalls, OfNothingInACodecAreOver) {
  for (std::string_view codec : kCodecs)
    for (std::string_view algorithm : {"ring", "direct", "gather"}) {
      const Case of = coded(codec, Collective::kAllReduce, algorithm, 3, 0, true);
      expect_same(of, label(of, algorithm) + ", of nothing");
    }
}

TEST(GpuCalls, OfManyArraysGiveTheBitsOfTheCpu) {
  for (std::string_view codec :
       {"", "fp16", "bf16", "int8:block=64", "onebit:block=64", "onebit", "threshold", "topk"})
    for (std::string_view algorithm : {"ring", "direct", "binary_tree", "halving_doubling"}) {
      const bool is_long = codec == "threshold" || codec == "topk";
      if ((is_long && algorithm != "ring") || (algorithm == "binary_tree" && codec != "fp16"))
        continue;
      const Case of = many_arrays(codec, algorithm, 3, DType::kFloat32, true);
      expect_same(of, label(of, algorithm) + ", many arrays");
    }
}

TEST(GpuCalls, OfManyNarrowArraysGiveTheBitsOfTheCpu) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat64})
    for (std::string_view algorithm : {"ring", "direct", "binary_tree", "recursive_doubling"}) {
      const Case of = many_arrays("", algorithm, 5, dtype, true);
      expect_same(of, label(of, algorithm) + ", many arrays");
    }
}

TEST(GpuCalls, OfValuesThatAreNotFiniteGiveTheBitsOfTheCpu) {
  for (std::string_view codec : {"", "fp16", "int8:block=64", "onebit:block=64"})
    for (std::string_view algorithm : {"ring", "direct"}) {
      const Case of = many_arrays(codec, algorithm, 3, DType::kFloat32, false);
      expect_same(of, label(of, algorithm) + ", not finite");
    }
}

TEST_P(GpuCollectives, CodecsOfOtherCollectives) {
  const int p = GetParam();
  if (p > 3) return;
  for (std::string_view codec : {"int8", "onebit", "threshold"})
    for (const auto& [collective, algorithm] : {std::pair(Collective::kReduceScatter, "ring"),
                                                std::pair(Collective::kReduce, "binary_tree"),
                                                std::pair(Collective::kReduceScatter, "gather")})
      for (bool feedback : {true, false}) {
        const Case of = coded(codec, collective, algorithm, p, 2500, feedback);
        expect_same(of, label(of, algorithm));
      }
}

// Rank 0 receives one chunk three times in a round, between chunks of another rank, and sends the
// sum in the next round.
TEST(GpuCalls, OfSchedulesWhoseAddendsLieUnevenlyGiveTheBitsOfTheCpu) {
  schedule::Builder builder(4, 2);
  for (Rank r : {1, 2, 3}) builder.reduce(0, r, 0, {0, r == 2 ? 2 : 1});
  for (Rank r : {1, 3}) builder.reduce(1, r, 0, {1, 2});
  for (Rank r : {1, 2, 3}) builder.copy(1, 0, r, {0, 1});
  for (Rank r : {1, 2, 3}) builder.copy(2, 0, r, {1, 2});
  const auto uneven = std::move(builder).build(Collective::kAllReduce, "uneven");
  for (std::string_view codec : {"none", "fp16", "int8:block=64", "onebit:block=64", "threshold"}) {
    Case of = coded(codec, Collective::kAllReduce, "auto", 4, 2100, /*feedback=*/true);
    of.request.schedule = &uneven;
    of.request.schedule_digest = schedule::digest(uneven);
    expect_same(of, label(of, "uneven"));
  }
}

TEST_P(GpuCollectives, LongRunsOfSparseCodecs) {
  const int p = GetParam();
  if (p != 2) return;
  for (std::string_view codec : {"threshold", "topk", "onebit"}) {
    const Case of = coded(codec, Collective::kAllReduce, "ring", p, 100001, true);
    expect_same(of, label(of, "ring"));
  }
}

// The host may look after hundreds of calls.
TEST(GpuCalls, FlagsOfEachOfManyCallsAreTold) {
  GpuRanks ranks(2);
  ranks.run([&](Rank rank) {
    DeviceBytes good(4 * 8), bad(4 * 8);
    good.put(std::vector<float>(8, 1.0F).data(), ranks.stream(rank));
    bad.put(std::vector<float>(8, std::numeric_limits<float>::quiet_NaN()).data(),
            ranks.stream(rank));
    for (int call = 0; call < 200; ++call) {
      const exec::Array array{(call == 0 ? bad : good).data(), 8};
      exec::Request request;
      request.codec = codec::make_codec("fp16");
      request.inputs = request.outputs = {&array, 1};
      ranks[rank].run(request, nullptr, ranks.stream(rank));
    }
    simulated_api().synchronize(ranks.stream(rank));
    EXPECT_EQ(ranks[rank].take_flags(), kNotFinite);
    EXPECT_EQ(ranks[rank].take_flags(), 0U);
  });
}

TEST_P(GpuCollectives, PlainDeliversResiduals) {
  const int p = GetParam();
  for (std::string_view algorithm : {"ring", "gather"}) {
    const Case of = coded("none", Collective::kAllReduce, algorithm, p, 700, true);
    expect_same(of, label(of, algorithm));
  }
}

// A CPU adds no residual in a first call, so a -0 is one still.
TEST_P(GpuCollectives, FirstCallsKeepTheSignsOfZeros) {
  const int p = GetParam();
  if (p > 3) return;
  std::vector<std::string_view> codecs(std::begin(kCodecs), std::end(kCodecs));
  codecs.push_back("none");
  for (std::string_view codec : codecs)
    for (std::string_view algorithm : {"ring", "gather"}) {
      Case of = coded(codec, Collective::kAllReduce, algorithm, p, 2100, true);
      std::vector<float> zeros(2100, -0.0F);  // the first block throughout
      for (std::size_t i = 1100; i < zeros.size(); i += 2) zeros[i] = i % 3 ? 0.0F : 1.0F;
      for (Arrays& each : of.inputs) each = {bytes_of(zeros)};
      of.calls = 1;
      expect_same(of, label(of, algorithm) + ", zeros");
    }
}

TEST_P(GpuCollectives, LowRank) {
  const int p = GetParam();
  if (p > 3) return;
  for (bool feedback : {true, false}) {
    Case of = arrays_for(Collective::kAllReduce, DType::kFloat32, p, 0, 1);
    for (Rank r = 0; r < p; ++r) {
      of.inputs[static_cast<std::size_t>(r)] = {bytes_of(values(r, 40 * 60, 1)),
                                                bytes_of(values(r, 33, 2)),
                                                bytes_of(values(r, 64 * 25, 3))};
      of.outputs[static_cast<std::size_t>(r)] = {40 * 60 * 4, 33 * 4, 64 * 25 * 4};
    }
    of.shapes = {{40, 60}, {1, 33}, {64, 25}};
    of.codec = "lowrank";
    of.request.algorithm = "ring";
    of.request.op = ReduceOp::kAvg;
    of.calls = feedback ? 3 : 1;
    if (feedback) of.keys = {{"a", 40 * 60 + 33}, {"b", 64 * 25}};
    expect_same(of, label(of, "ring") + (feedback ? " with feedback" : ""));
  }
}

std::atomic<int> blocks_in_use = 0;

// Of keys that change with each call: only their residuals stay.
TEST(GpuFeedback, ReleasesTablesOfKeysThatAreNotUsedTogetherAgain) {
  constexpr std::size_t kKeys = 92;
  static_assert(kKeys * (kKeys - 1) / 2 > GpuFeedback::kMostTables);
  Api api = simulated_api();
  api.allocate = [](void** address, std::size_t bytes) {
    ++blocks_in_use;
    return simulated_api().allocate(address, bytes);
  };
  api.release = [](void* address) {
    --blocks_in_use;
    return simulated_api().release(address);
  };
  const OwnedStream stream(api);
  GpuFeedback feedback(api, std::make_shared<codec::ErrorFeedback>());
  int most = 0;
  for (std::size_t a = 0; a < kKeys; ++a)
    for (std::size_t b = 0; b < a; ++b) {
      const codec::KeyedArray arrays[] = {{"key " + std::to_string(a), 1},
                                          {"key " + std::to_string(b), 1}};
      const auto& table = feedback.open(arrays, {stream.get()});
      ASSERT_EQ(table.keys.size(), 2U);
      most = std::max(most, blocks_in_use.load());
    }
  EXPECT_GT(most, static_cast<int>(GpuFeedback::kMostTables));
  EXPECT_LT(blocks_in_use, 1000);
}

INSTANTIATE_TEST_SUITE_P(Ranks, GpuCollectives, testing::ValuesIn(kSizes));

}  // namespace
}  // namespace gradwire::cuda
