// Error feedback through whole collectives: conservation, transactions, agreement.
#include <gtest/gtest.h>

#include <cmath>
#include "exec_feedback_job.h"
#include "gradwire/base/error.h"

namespace gradwire::exec {
namespace exec_feedback_test {

// Whatever codec, schedule and length: nothing is lost but float32 rounding.
TEST(Feedback, WhatIsDeliveredAndWhatIsKeptAddUp) {
  for (int size : {1, 2, 3, 4, 5})
    for (const Case& how : cases()) {
      Job job(size, {{"a", 3000}, {"b", 1}, {"empty", 0}, {"c", 1025}});
      std::vector<double> given(job.count()), delivered(job.count()), scale(job.count(), 0);
      for (int call = 0; call < 6; ++call) {
        std::vector<Values> x;
        for (int r = 0; r < size; ++r) x.push_back(inputs(r, call, job.count()));
        for (const Values& each : x)
          for (std::size_t i = 0; i < each.size(); ++i) {
            given[i] += each[i];
            scale[i] += 4 * std::fabs(each[i]);
          }
        const auto y = job.all_reduce(how, x);
        expect_same_bits(y, how);
        for (std::size_t i = 0; i < y[0].size(); ++i) delivered[i] += y[0][i];
      }
      const auto kept = job.residuals();
      for (std::size_t i = 0; i < given.size(); ++i)
        ASSERT_NEAR(delivered[i] + kept[i], given[i], (scale[i] + 1) * 0x1p-20)
            << how.codec << " " << how.algorithm << " p=" << size << " element " << i;
    }
}

TEST(Feedback, TheAverageIsTheSumDivided) {
  for (const Case& how : cases()) {
    Job sum(3, {{"a", 2000}}), avg(3, {{"a", 2000}});
    for (int call = 0; call < 3; ++call) {
      std::vector<Values> x;
      for (int r = 0; r < 3; ++r) x.push_back(inputs(r, call, 2000));
      const auto s = sum.all_reduce(how, x), a = avg.all_reduce(how, x, ReduceOp::kAvg);
      for (std::size_t i = 0; i < 2000; ++i)
        ASSERT_EQ(a[0][i], s[0][i] * static_cast<float>(1.0 / 3)) << how.codec << how.algorithm;
      for (std::size_t r = 0; r < 3; ++r)
        EXPECT_EQ(avg.feedback[r]->residual("a"), sum.feedback[r]->residual("a"));
    }
  }
}

TEST(Feedback, CodecAndScheduleMayChangeAtEveryCall) {
  Job job(4, {{"a", 5000}});
  std::vector<double> given(5000), delivered(5000);
  int call = 0;
  for (const Case& how : cases()) {
    std::vector<Values> x;
    for (int r = 0; r < 4; ++r) x.push_back(inputs(r, call, 5000));
    for (const Values& each : x)
      for (std::size_t i = 0; i < each.size(); ++i) given[i] += each[i];
    const auto y = job.all_reduce(how, x);
    for (std::size_t i = 0; i < 5000; ++i) delivered[i] += y[0][i];
    ++call;
  }
  const auto kept = job.residuals();
  for (std::size_t i = 0; i < 5000; ++i)
    ASSERT_NEAR(delivered[i] + kept[i], given[i], 40 * call * 0x1p-20) << i;
}

TEST(Feedback, OneNanAnywhereMovesNoResidual) {
  for (const Case& how : cases())
    for (float bad : {NAN, INFINITY}) {
      Job job(3, {{"a", 3000}});
      std::vector<Values> x;
      for (int r = 0; r < 3; ++r) x.push_back(inputs(r, 0, 3000));
      job.all_reduce(how, x);
      std::vector<Values> before;
      for (const auto& each : job.feedback) before.push_back(each->residual("a"));
      x[1][2999] = bad;
      const auto y = job.all_reduce(how, x);
      for (const Values& each : y)
        EXPECT_FALSE(std::isfinite(each[2999])) << how.codec << " " << how.algorithm;
      for (std::size_t r = 0; r < 3; ++r)
        EXPECT_EQ(job.feedback[r]->residual("a"), before[r]) << how.codec << " " << how.algorithm;
    }
}

// Checks calls of three ranks.
void expect_conserved(Job& job, Collective collective, const Case& how) {
  const std::size_t count = job.count();
  std::vector<double> given(count), delivered(count);
  for (int call = 0; call < 3; ++call) {
    std::vector<Values> x;
    for (int r = 0; r < 3; ++r) x.push_back(inputs(r, call, count));
    for (const Values& each : x)
      for (std::size_t i = 0; i < each.size(); ++i) given[i] += each[i];
    for (const Values& each : job.reduce(collective, how, x))
      for (std::size_t i = 0; i < each.size(); ++i) delivered[i] += each[i];
  }
  const auto kept = job.residuals();
  for (std::size_t i = 0; i < count; ++i)
    ASSERT_NEAR(delivered[i] + kept[i], given[i], 64 * 0x1p-20)
        << how.codec << " " << how.algorithm << " element " << i;
}

// Ranks hold different blocks, or none, and agree all the same.
TEST(Feedback, ReduceScatterAndReduceConserveAndAgree) {
  for (const Case& how : cases())
    for (Collective collective : {Collective::kReduceScatter, Collective::kReduce}) {
      Job job(3, {{"a", 2100}});
      expect_conserved(job, collective, how);
    }
}

// Inside a block and inside a unit: units are counted from where the key begins in the block, so
// that segments do not change a bit here either.
TEST(Feedback, KeysOfReduceScatterMayEndAnywhere) {
  const std::vector<KeyedArray> keys = {{"a", 333}, {"no", 0}, {"b", 1}, {"c", 1066}, {"d", 700}};
  for (const Case& how : cases()) {
    Job job(3, keys), cut(3, keys, {"shm", 600, true});
    expect_conserved(job, Collective::kReduceScatter, how);
    expect_conserved(cut, Collective::kReduceScatter, how);
    const auto before = job.residuals();
    EXPECT_EQ(cut.residuals(), before) << how.codec << " " << how.algorithm;
    std::vector<Values> x(3, Values(job.count(), 1));
    x[1][1400] = NAN;  // of the last key alone
    const auto y = job.reduce(Collective::kReduceScatter, how, x);
    for (std::size_t i = 0; i < job.count(); ++i)
      ASSERT_TRUE(std::isnan(y[i / 700][i])) << how.codec << " " << how.algorithm;
    EXPECT_EQ(job.residuals(), before) << how.codec << " " << how.algorithm;
  }
}

std::vector<std::uint64_t> arrays_of(const std::vector<std::uint64_t>& blocks,
                                     const std::vector<KeyedArray>& keys) {
  std::vector<Array> arrays;
  for (std::uint64_t count : blocks) arrays.push_back({nullptr, count});
  Request call;
  call.collective = Collective::kReduceScatter;
  call.keys = keys;
  call.inputs = arrays;
  call.size = static_cast<int>(blocks.size());
  std::vector<std::uint64_t> counts;
  array_counts(call, counts);
  return counts;
}

TEST(Feedback, BlocksAreCutWhereKeysEnd) {
  using Counts = std::vector<std::uint64_t>;
  EXPECT_EQ(arrays_of({10, 20}, {}), Counts({10, 20}));
  EXPECT_EQ(arrays_of({10, 20}, {{"a", 30}}), Counts({10, 20}));
  EXPECT_EQ(arrays_of({10, 20}, {{"a", 10}, {"b", 0}, {"c", 20}}), Counts({10, 20}));
  EXPECT_EQ(arrays_of({10, 0, 5}, {{"a", 3}, {"b", 0}, {"c", 12}}), Counts({3, 7, 0, 0, 5, 0}));
  EXPECT_EQ(arrays_of({4, 4}, {{"a", 5}, {"b", 1}, {"c", 2}}), Counts({4, 0, 0, 1, 1, 2}));
}

std::string refusal(Job& job, std::vector<KeyedArray> keys) {
  std::string text;
  std::swap(job.keys, keys);
  Values x(4);
  Array array = array_of(x);
  try {
    Request call;
    call.codec = codec::make_codec("bf16");
    call.feedback = job.feedback[0];
    call.keys = job.keys;
    call.inputs = call.outputs = {&array, 1};
    job.ranks[0].run(call);
  } catch (const InvalidArgument& error) {
    text = error.what();
  }
  std::swap(job.keys, keys);
  return text;
}

TEST(Feedback, KeysMustFitTheArrays) {
  Job job(1, {{"a", 4}});
  EXPECT_EQ(refusal(job, {{"a", 4}}), "");
  EXPECT_NE(refusal(job, {{"b", 3}}), "");
  EXPECT_NE(refusal(job, {{"b", 5}}), "");
  EXPECT_NE(refusal(job, {{"b", 2}, {"c", 2}}), "");  // an array of two keys
  EXPECT_NE(refusal(job, {}), "");
  EXPECT_EQ(refusal(job, {{"b", 4}}), "");  // what was refused is not open
}

TEST(Feedback, AFailedCallLeavesTheResiduals) {
  for (const char* algorithm : {"ring", "gather"}) {
    Job job(2, {{"a", 100}});
    job.all_reduce({"bf16", algorithm}, {inputs(0, 0, 100), inputs(1, 0, 100)});
    const Values before = job.feedback[0]->residual("a");
    Values x(100, 1);
    Array array = array_of(x);
    Request call;
    call.codec = codec::make_codec("bf16");
    call.algorithm = algorithm;
    call.feedback = job.feedback[0];
    call.keys = job.keys;
    call.inputs = call.outputs = {&array, 1};
    const auto work = job.ranks[0].submit(call);
    EXPECT_THROW(job.ranks[0].submit(call), InvalidArgument);  // one key in two pending calls
    job.ranks[0].abort("on purpose");
    EXPECT_THROW(job.ranks[0].wait(*work, 10), Aborted);
    EXPECT_EQ(job.feedback[0]->residual("a"), before);
    EXPECT_NO_THROW(job.feedback[0]->scale(1));  // nothing is open
  }
}

// What it kept is all that a job goes on from: not the communicator, nor the codec's object.
TEST(Feedback, AResumedJobHasTheBitsOfOneThatWasNotInterrupted) {
  const std::vector<KeyedArray> keys = {{"a", 3000}, {"b", 1500}};
  std::vector<Case> all = cases();
  for (const char* algorithm : {"ring", "direct", "gather"})
    all.push_back({"int8:rounding=stochastic,seed=3", algorithm});
  for (const Case& how : all) {
    const auto x = [](int call) {
      return std::vector{inputs(0, call, 4500), inputs(1, call, 4500)};
    };
    Job whole(2, keys), resumed(2, keys);
    for (int call = 0; call < 3; ++call) whole.all_reduce(how, x(call));
    for (std::size_t r = 0; r < 2; ++r) resumed.feedback[r]->load(whole.feedback[r]->save());
    for (int call = 3; call < 5; ++call)
      EXPECT_EQ(resumed.all_reduce(how, x(call)), whole.all_reduce(how, x(call)))
          << how.codec << " " << how.algorithm;
  }
}

// No two keys, ranks or calls have the same: what is given is, and what it is rounded to is not.
TEST(Feedback, RandomRoundingsDiffer) {
  const Values x(1000, 0.3F);
  Job job(2, {{"a", 500}, {"b", 500}});
  Values largest(1000, 0.3F);
  largest[0] = largest[500] = 1;
  const Case how{"int8:rounding=stochastic", "ring"};
  std::vector<Values> errors;
  for (int call = 0; call < 2; ++call) {
    for (const auto& each : job.feedback) each->scale(0);
    job.all_reduce(how, {largest, largest});
    for (const auto& each : job.feedback)
      for (const char* key : {"a", "b"}) errors.push_back(each->residual(key));
  }
  for (std::size_t i = 0; i < errors.size(); ++i)
    for (std::size_t j = 0; j < i; ++j) EXPECT_NE(errors[i], errors[j]) << i << " " << j;
}

}  // namespace exec_feedback_test
}  // namespace gradwire::exec
