// All_reduces in codecs over NCCL, a fake one: `direct` is an all-to-all and an all-gather, and
// gives the bits of CPUs; so do other algorithms, as messages.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "cuda_cases.h"
#include "cuda_nccl_ranks.h"

namespace gradwire::cuda::direct {
namespace {

class CudaDirect : public testing::TestWithParam<std::string_view> {
 protected:
  CudaDirect() {
    ::setenv("GRADWIRE_NCCL_SO", GRADWIRE_FAKE_NCCL, 1);
    start();
  }
  ~CudaDirect() override {
    EXPECT_EQ(fake.calls("misuse"), 0);
    EXPECT_EQ(fake.alive(), 0);
    fake.reset();
  }
  void start() const {
    fake.reset();
    fake.copy_by(&simulated_api());
  }

  static void expect_the_cpus(const Case& of, std::string_view algorithm,
                              const Nccl& nccl = Nccl::load()) {
    Case ours = of;
    ours.request.algorithm = algorithm;
    GpuRanks ranks(nccl_messages(nccl, static_cast<int>(of.inputs.size())));
    expect_same(on_gpus(ours, ranks), on_cpus(of), label(of, algorithm));
  }
  void expect_two_operations(int calls) const {
    EXPECT_EQ(fake.calls("ncclAlltoAll"), calls);
    EXPECT_EQ(fake.calls("ncclAllGather"), calls);
    EXPECT_EQ(fake.calls("ncclSend"), 0);
  }

  // Threshold and topk have blocks of 1,024 threads for any array, which the simulated device takes
  // long for.
  static bool is_sparse() { return GetParam().starts_with("t"); }

  const FakeNccl& fake = fake_nccl();
};

TEST_P(CudaDirect, HasTheBitsOfCpus) {
  for (int p = 2; p <= 8; ++p)
    for (const bool feedback : {false, true}) {
      if (!feedback && p != 3) continue;
      start();
      // Units of threshold and topk are long: each rank owns one, or some none.
      const bool is_long = is_sparse() && p == 3 && feedback;
      const auto n = is_long ? std::size_t{100'003} : static_cast<std::size_t>(1000 * p + 7);
      const Case of = coded(GetParam(), Collective::kAllReduce, "direct", p, n, feedback);
      expect_the_cpus(of, "direct");
      expect_two_operations(p * of.calls);
    }
}

TEST_P(CudaDirect, IsWhatAutoTakes) {
  const Case of = coded(GetParam(), Collective::kAllReduce, "direct", 3, 5'000, true);
  expect_the_cpus(of, "auto");
  expect_two_operations(3 * of.calls);
}

// Some ranks own nothing, and chunks are of several lengths.
TEST_P(CudaDirect, OfManyArraysAndOfFewElements) {
  if (is_sparse()) return;
  const Case many = many_arrays(GetParam(), "direct", 4, DType::kFloat32, /*is_finite=*/true);
  expect_the_cpus(many, "direct");
  expect_two_operations(4 * many.calls);
  for (const std::size_t n : {0, 1, 40})
    expect_the_cpus(coded(GetParam(), Collective::kAllReduce, "direct", 5, n, true), "direct");
}

TEST_P(CudaDirect, LeavesResidualsWhereAResultIsNotFinite) {
  if (is_sparse()) return;
  expect_the_cpus(many_arrays(GetParam(), "direct", 3, DType::kFloat32, /*is_finite=*/false),
                  "direct");
}

TEST_P(CudaDirect, InPlaceSums) {
  Case of = coded(GetParam(), Collective::kAllReduce, "direct", 3, 1'000, true);
  of.in_place = true;
  of.request.op = ReduceOp::kSum;
  expect_the_cpus(of, "direct");
}

TEST_P(CudaDirect, OverANcclThatHasNoAllToAll) {
  Nccl older = Nccl::load();
  older.all_to_all = nullptr;
  const Case of = coded(GetParam(), Collective::kAllReduce, "direct", 3, 1'000, true);
  expect_the_cpus(of, "direct", older);
  EXPECT_EQ(fake.calls("ncclAlltoAll"), 0);
  EXPECT_EQ(fake.calls("ncclSend"), 3 * 3 * of.calls);
  EXPECT_EQ(fake.calls("ncclAllGather"), 3 * of.calls);
}

TEST_P(CudaDirect, OtherAlgorithmsAreMessages) {
  for (const char* algorithm : {"ring", "binary_tree", "halving_doubling"}) {
    start();
    expect_the_cpus(coded(GetParam(), Collective::kAllReduce, algorithm, 4, 1'000, true),
                    algorithm);
    EXPECT_GT(fake.calls("ncclSend"), 0) << algorithm;
    EXPECT_EQ(fake.calls("ncclAlltoAll") + fake.calls("ncclAllGather"), 0) << algorithm;
  }
}

INSTANTIATE_TEST_SUITE_P(Codecs, CudaDirect, testing::ValuesIn(kCodecs),
                         [](const auto& each) { return "codec" + std::to_string(each.index); });

}  // namespace
}  // namespace gradwire::cuda::direct
