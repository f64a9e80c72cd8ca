// Calls on a GPU give the bits of the same calls on CPUs: every collective, schedule and codec.
#include <gtest/gtest.h>

#include <cmath>
#include <complex>
#include <random>

#include "cuda_ranks.h"
#include "gradwire/schedule/generators.h"

namespace gradwire::cuda {
namespace {

constexpr int kSizes[] = {1, 2, 3, 4, 5, 8};

std::vector<float> values(Rank rank, std::size_t n, unsigned seed) {
  std::mt19937 random(seed * 64 + static_cast<unsigned>(rank));
  std::normal_distribution<float> normal;
  std::vector<float> x(n);
  for (float& each : x) each = normal(random);
  return x;
}

void expect_same(const Outcome& gpu, const Outcome& cpu, const std::string& what) {
  for (std::size_t r = 0; r < cpu.results.size(); ++r) {
    ASSERT_EQ(gpu.results[r].size(), cpu.results[r].size()) << what;
    for (std::size_t i = 0; i < cpu.results[r].size(); ++i)
      EXPECT_TRUE(gpu.results[r][i] == cpu.results[r][i])
          << what << ": result " << i << " of rank " << r;
    ASSERT_EQ(gpu.kept[r].size(), cpu.kept[r].size()) << what;
    for (const auto& [key, kept] : cpu.kept[r]) {
      const auto& its = gpu.kept[r].at(key);
      EXPECT_EQ(its.calls, kept.calls) << what;
      EXPECT_TRUE(exec::same_bits(its.residual, kept.residual)) << what << ": residual of " << key;
      EXPECT_TRUE(exec::same_bits(its.memory, kept.memory)) << what << ": memory of " << key;
      EXPECT_EQ(its.codec_state.tau, kept.codec_state.tau) << what;
    }
  }
}

void expect_same(const Case& of, const std::string& what) {
  const Outcome cpu = on_cpus(of);
  expect_same(on_gpus(of), cpu, what);
}

// Arrays of any dtype, whose bytes are small integers of it.
std::vector<std::byte> small(DType dtype, Rank rank, std::size_t n) {
  std::vector<std::byte> bytes;
  for (std::size_t i = 0; i < n; ++i) {
    const int value = static_cast<int>((i * 7 + static_cast<std::size_t>(rank) * 13) % 5);
    const auto add = [&](auto typed) {
      const auto* at = reinterpret_cast<const std::byte*>(&typed);
      bytes.insert(bytes.end(), at, at + sizeof typed);
    };
    switch (dtype) {
      case DType::kFloat32:
        add(static_cast<float>(value) * 0.37F);
        break;
      case DType::kFloat64:
        add(static_cast<double>(value) * 0.37);
        break;
      case DType::kFloat16:
      case DType::kBFloat16:
        add(static_cast<std::uint16_t>(0x3C00 + value * 77));
        break;
      case DType::kInt32:
      case DType::kUInt32:
        add(static_cast<std::int32_t>(value));
        break;
      case DType::kInt64:
      case DType::kUInt64:
        add(static_cast<std::int64_t>(value));
        break;
      case DType::kInt16:
      case DType::kUInt16:
        add(static_cast<std::int16_t>(value));
        break;
      case DType::kComplex64:
        add(std::complex<float>(static_cast<float>(value) * 0.37F, 1.1F));
        break;
      case DType::kComplex128:
        add(std::complex<double>(value * 0.37, 1.1));
        break;
      default:
        add(static_cast<std::uint8_t>(value));
    }
  }
  return bytes;
}

// The arrays that a collective takes, of n elements, or of blocks of n.
Case arrays_for(Collective collective, DType dtype, int p, Rank root, std::size_t n) {
  Case of;
  of.request.collective = collective;
  of.request.dtype = dtype;
  of.request.root = root;
  const std::size_t bytes = n * size_of(dtype);
  for (Rank r = 0; r < p; ++r) {
    const bool at_root = r == root;
    const auto one = [&](int copies) {
      Arrays made;
      for (int i = 0; i < copies; ++i) made.push_back(small(dtype, r * p + i, n));
      return made;
    };
    const auto room = [&](int copies) {
      return std::vector<std::size_t>(static_cast<std::size_t>(copies), bytes);
    };
    switch (collective) {
      case Collective::kAllReduce:
        of.inputs.push_back(one(1)), of.outputs.push_back(room(1));
        break;
      case Collective::kReduce:
        of.inputs.push_back(one(1)), of.outputs.push_back(room(at_root ? 1 : 0));
        break;
      case Collective::kBroadcast:
        of.inputs.push_back(one(at_root ? 1 : 0)), of.outputs.push_back(room(1));
        break;
      case Collective::kReduceScatter:
        of.inputs.push_back(one(p)), of.outputs.push_back(room(1));
        break;
      case Collective::kAllGather:
        of.inputs.push_back(one(1)), of.outputs.push_back(room(p));
        break;
      case Collective::kGather:
        of.inputs.push_back(one(1)), of.outputs.push_back(room(at_root ? p : 0));
        break;
      case Collective::kScatter:
        of.inputs.push_back(one(at_root ? p : 0)), of.outputs.push_back(room(1));
        break;
      case Collective::kAllToAll:
        of.inputs.push_back(one(p)), of.outputs.push_back(room(p));
        break;
    }
  }
  return of;
}

std::string label(const Case& of, std::string_view algorithm) {
  return std::string(name_of(of.request.collective)) + " by " + std::string(algorithm) + " of " +
         std::string(name_of(of.request.dtype)) + " " + std::string(name_of(of.request.op)) +
         " p=" + std::to_string(of.inputs.size()) + " codec " + of.codec;
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

// Floats with feedback, three calls of the same inputs, and several keys.
Case coded(std::string_view codec, Collective collective, std::string_view algorithm, int p,
           std::size_t n, bool feedback) {
  Case of = arrays_for(collective, DType::kFloat32, p, 0, n);
  for (Rank r = 0; r < p; ++r)
    for (std::size_t i = 0; i < of.inputs[static_cast<std::size_t>(r)].size(); ++i)
      of.inputs[static_cast<std::size_t>(r)][i] =
          bytes_of(values(r, n, static_cast<unsigned>(i + 1)));
  of.codec = codec;
  of.request.algorithm = algorithm;
  of.request.op = ReduceOp::kAvg;
  of.calls = feedback ? 3 : 1;
  if (!feedback) return of;
  std::size_t whole = 0;
  for (const auto& each : of.inputs[0]) whole += each.size() / sizeof(float);
  of.keys = {{"only", whole}};
  return of;
}

constexpr std::string_view kCodecs[] = {"fp16",
                                        "bf16",
                                        "fp16:scale=1024",
                                        "int8",
                                        "int8:rounding=stochastic,seed=5",
                                        "int8:block=96",
                                        "onebit",
                                        "onebit:block=64",
                                        "threshold",
                                        "threshold:tau=0.5",
                                        "topk",
                                        "topk:density=0.3,values=fp16"};

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

// More arrays than one launch takes, of odd lengths: some mostly zero, so that onebit sends masks.
Case many_arrays(std::string_view codec, std::string_view algorithm, int p, DType dtype,
                 bool is_finite) {
  Case of;
  of.request.algorithm = algorithm;
  of.request.dtype = dtype;
  of.request.op = ReduceOp::kAvg;
  of.codec = codec;
  of.calls = 2;
  of.inputs.resize(static_cast<std::size_t>(p));
  of.outputs.resize(static_cast<std::size_t>(p));
  for (std::size_t i = 0; i < kMostRuns + 5; ++i) {
    const std::size_t n = i == 7 ? 2500 : 1 + i * 13 % 70;
    for (Rank r = 0; r < p; ++r) {
      const auto me = static_cast<std::size_t>(r);
      std::vector<float> x = values(r, n, static_cast<unsigned>(i));
      for (std::size_t k = 0; i % 3 == 1 && k < n; ++k)
        if (k % 5 != me % 5) x[k] = 0;
      if (!is_finite && i == 3 && r == 1) x[0] = INFINITY;
      const bool wide = dtype == DType::kFloat32;
      of.inputs[me].push_back(wide ? bytes_of(x) : small(dtype, r, n));
      of.outputs[me].push_back(n * size_of(dtype));
    }
    if (dtype == DType::kFloat32) of.keys.push_back({"key " + std::to_string(i), n});
  }
  return of;
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

INSTANTIATE_TEST_SUITE_P(Ranks, GpuCollectives, testing::ValuesIn(kSizes));

}  // namespace
}  // namespace gradwire::cuda
