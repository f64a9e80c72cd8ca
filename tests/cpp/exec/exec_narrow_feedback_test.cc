// Residuals in bfloat16 through whole collectives: what is lost is rounding without a bias; all
// else is as with float32 (exec_feedback_test.cc).
#include <gtest/gtest.h>

#include <cmath>

#include "exec_feedback_job.h"
#include "gradwire/base/error.h"

namespace gradwire::exec {
namespace exec_narrow_feedback_test {

constexpr auto kBFloat16 = codec::ResidualType::kBFloat16;

std::vector<Case> every_case() {
  std::vector<Case> all = cases();
  for (const char* algorithm : {"auto", "ring"}) all.push_back({"lowrank:rank=2", algorithm});
  return all;
}

struct Balance {
  double bias = 0, spread = 0;  // of the losses of all elements, in steps of bfloat16
};

// What a job loses of each element, in units of the largest step to which its residuals were
// rounded.
Balance balance(int size, const Case& how, const std::vector<KeyedArray>& keys) {
  Job job(size, keys, {}, kBFloat16);
  if (how.codec.starts_with("lowrank"))
    for (const auto& each : keys)
      job.shapes.push_back(
          {std::max<std::size_t>(each.count / 60, 1), std::min<std::size_t>(each.count, 60)});
  std::vector<double> lost(job.count()), step(job.count(), 1e-9);
  for (int call = 0; call < 6; ++call) {
    std::vector<Values> x;
    for (int r = 0; r < size; ++r) x.push_back(inputs(r, call, job.count()));
    for (const Values& each : x)
      for (std::size_t i = 0; i < each.size(); ++i) lost[i] += each[i];
    const auto y = job.all_reduce(how, x);
    expect_same_bits(y, how);
    for (std::size_t i = 0; i < y[0].size(); ++i) lost[i] -= y[0][i];
    std::size_t at = 0;
    for (const auto& key : keys) {
      for (const Values& e : job.residuals_of(key.key))
        for (std::size_t i = 0; i < e.size(); ++i)
          step[at + i] = std::max(step[at + i], std::fabs(e[i]) * 0x1p-7);
      at += key.count;
    }
  }
  const auto kept = job.residuals();
  Balance found;
  for (std::size_t i = 0; i < lost.size(); ++i) {
    const double steps = (lost[i] - kept[i]) / step[i];
    EXPECT_LT(std::fabs(lost[i] - kept[i]), 6 * size * step[i] + 1e-5) << how.codec << " " << i;
    found.bias += steps / static_cast<double>(lost.size());
    found.spread += steps * steps / static_cast<double>(lost.size());
  }
  return found;
}

TEST(NarrowFeedback, InExpectationNothingIsLost) {
  const std::vector<KeyedArray> keys = {{"a", 3000}, {"b", 1}, {"empty", 0}, {"c", 20100}};
  for (int size : {1, 2, 3})
    for (const Case& how : every_case()) {
      const auto [bias, spread] = balance(size, how, keys);
      EXPECT_LT(std::fabs(bias), 5 * std::sqrt(spread / 23101) + 1e-3)
          << how.codec << " " << how.algorithm << " p=" << size;
    }
}

TEST(NarrowFeedback, OneNanAnywhereMovesNoResidual) {
  for (const Case& how : every_case()) {
    Job job(3, {{"a", 3000}}, {}, kBFloat16);
    if (how.codec.starts_with("lowrank")) job.shapes = {{50, 60}};
    std::vector<Values> x;
    for (int r = 0; r < 3; ++r) x.push_back(inputs(r, 0, 3000));
    job.all_reduce(how, x);
    const auto before = job.residuals_of("a");
    x[1][2999] = NAN;
    job.all_reduce(how, x);
    EXPECT_EQ(job.residuals_of("a"), before) << how.codec << " " << how.algorithm;
  }
}

TEST(NarrowFeedback, AFailedCallLeavesTheResiduals) {
  for (const char* algorithm : {"ring", "gather"}) {
    Job job(2, {{"a", 100}}, {}, kBFloat16);
    job.all_reduce({"onebit", algorithm}, {inputs(0, 0, 100), inputs(1, 0, 100)});
    const Values before = job.feedback[0]->residual("a");
    Values x(100, 1);
    Array array = job.array_at(x, 0, 100);
    Request call;
    call.codec = codec::make_codec("onebit");
    call.algorithm = algorithm;
    call.feedback = job.feedback[0];
    call.keys = job.keys;
    call.inputs = call.outputs = {&array, 1};
    const auto work = job.ranks[0].submit(call);
    job.ranks[0].abort("on purpose");
    EXPECT_THROW(job.ranks[0].wait(*work, 10), Aborted);
    EXPECT_EQ(job.feedback[0]->residual("a"), before);
    EXPECT_NO_THROW(job.feedback[0]->scale(1));  // nothing is open
  }
}

TEST(NarrowFeedback, NeitherSegmentsNorTransportChangeABit) {
  const std::vector<KeyedArray> keys = {{"a", 333}, {"no", 0}, {"b", 1}, {"c", 40'000}};
  for (const Case& how : cases()) {
    Job job(3, keys, {}, kBFloat16), cut(3, keys, {"shm", 600, true}, kBFloat16);
    for (int call = 0; call < 3; ++call) {
      const auto x = std::vector{inputs(0, call, job.count()), inputs(1, call, job.count()),
                                 inputs(2, call, job.count())};
      const auto y = job.all_reduce(how, x), z = cut.all_reduce(how, x);
      EXPECT_TRUE(same_bits(y[0], z[0])) << how.codec << " " << how.algorithm;
    }
    for (const char* key : {"a", "b", "c"})
      EXPECT_EQ(cut.residuals_of(key), job.residuals_of(key)) << how.codec << " " << how.algorithm;
  }
}

TEST(NarrowFeedback, ReduceScatterAndReduceConserveInExpectation) {
  constexpr std::size_t kCount = 21'000;
  for (const Case& how : cases())
    for (Collective collective : {Collective::kReduceScatter, Collective::kReduce}) {
      Job job(3, {{"a", kCount}}, {}, kBFloat16);
      std::vector<double> lost(kCount);
      for (int call = 0; call < 3; ++call) {
        std::vector<Values> x;
        for (int r = 0; r < 3; ++r) x.push_back(inputs(r, call, kCount));
        for (const Values& each : x)
          for (std::size_t i = 0; i < kCount; ++i) lost[i] += each[i];
        for (const Values& each : job.reduce(collective, how, x))
          for (std::size_t i = 0; i < each.size(); ++i) lost[i] -= each[i];
      }
      const auto kept = job.residuals();
      double bias = 0, spread = 0;
      for (std::size_t i = 0; i < kCount; ++i) {
        bias += (lost[i] - kept[i]) / kCount;
        spread += (lost[i] - kept[i]) * (lost[i] - kept[i]) / kCount;
      }
      EXPECT_LT(spread, 0.01) << how.codec << " " << how.algorithm;
      EXPECT_LT(std::fabs(bias), 5 * std::sqrt(spread / kCount) + 1e-5)
          << how.codec << " " << how.algorithm;
    }
}

TEST(NarrowFeedback, AResumedJobHasTheBitsOfOneThatWasNotInterrupted) {
  const std::vector<KeyedArray> keys = {{"a", 3000}, {"b", 1500}};
  for (const Case& how : cases()) {
    const auto x = [](int call) {
      return std::vector{inputs(0, call, 4500), inputs(1, call, 4500)};
    };
    Job whole(2, keys, {}, kBFloat16), resumed(2, keys, {}, kBFloat16);
    for (int call = 0; call < 3; ++call) whole.all_reduce(how, x(call));
    for (std::size_t r = 0; r < 2; ++r) resumed.feedback[r]->load(whole.feedback[r]->save());
    for (int call = 3; call < 5; ++call)
      EXPECT_EQ(resumed.all_reduce(how, x(call)), whole.all_reduce(how, x(call)))
          << how.codec << " " << how.algorithm;
    EXPECT_EQ(resumed.residuals_of("a"), whole.residuals_of("a"));
  }
}

// Ranks that are given the same round it differently, or their losses would add up.
TEST(NarrowFeedback, RanksRoundDifferently) {
  for (const char* codec : {"onebit", "int8", "topk:density=0.01"}) {
    Job job(2, {{"a", 20'000}}, {}, kBFloat16);
    const Values x = inputs(0, 0, 20'000);
    job.all_reduce({codec, "gather"}, {x, x});
    const auto kept = job.residuals_of("a");
    EXPECT_NE(kept[0], kept[1]) << codec;
    for (std::size_t i = 0; i < x.size(); ++i)
      ASSERT_NEAR(kept[0][i], kept[1][i], std::fabs(kept[0][i]) * 0x1p-6) << codec;
  }
}

}  // namespace exec_narrow_feedback_test
}  // namespace gradwire::exec
