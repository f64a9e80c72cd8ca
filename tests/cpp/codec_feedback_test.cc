#include "gradwire/codec/feedback.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gradwire/base/error.h"
#include "gradwire/codec/codec.h"

namespace gradwire::codec {
namespace {

using Transaction = ErrorFeedback::Transaction;
using Values = std::vector<float>;

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

void book(Transaction& transaction, std::size_t extent, const Values& values) {
  std::copy(values.begin(), values.end(), transaction.next(extent).begin());
}

TEST(ErrorFeedback, CommitReplacesTheResidual) {
  ErrorFeedback feedback;
  for (const Values& values : {Values{1, 2}, Values{3, 4}}) {
    Transaction transaction(feedback, {{"w", 2}});
    book(transaction, 0, values);
    transaction.settle(true);
    EXPECT_EQ(feedback.residual("w"), values);
  }
}

TEST(ErrorFeedback, NextLiesBesideTheResidual) {
  ErrorFeedback feedback;
  feedback.add("w", Values{1, 2});
  for (int call = 0; call < 3; ++call) {
    Transaction transaction(feedback, {{"w", 2}});
    const auto residual = transaction.residual(0);
    EXPECT_EQ(Values(residual.begin(), residual.end()), (Values{1, 2}));
    book(transaction, 0, {7, 7});
    transaction.settle(false);
  }
}

TEST(ErrorFeedback, RollbackAndDestructionLeaveTheResidual) {
  ErrorFeedback feedback;
  feedback.add("w", Values{1, 2});
  {
    Transaction transaction(feedback, {{"w", 2}});
    book(transaction, 0, {9, 9});
    transaction.settle(false);
  }
  {
    Transaction transaction(feedback, {{"w", 2}});
    book(transaction, 0, {9, 9});
  }
  EXPECT_EQ(feedback.residual("w"), (Values{1, 2}));
}

TEST(ErrorFeedback, KeysOfOneCallCommitTogether) {
  ErrorFeedback feedback;
  Transaction transaction(feedback, {{"b", 1}, {"a", 3}});
  EXPECT_TRUE(transaction.residual(0).empty());
  EXPECT_EQ(transaction.next(0).size(), 1U);
  EXPECT_EQ(transaction.next(1).size(), 3U);
  EXPECT_TRUE(feedback.keys().empty());
  transaction.settle(true);
  const auto keys = feedback.keys();
  ASSERT_EQ(keys.size(), 2U);
  EXPECT_EQ(keys[0].key, "a");
  EXPECT_EQ(keys[0].count, 3U);
  EXPECT_EQ(keys[1].key, "b");
}

TEST(ErrorFeedback, AKeyIsInOneOpenTransactionOnly) {
  ErrorFeedback feedback;
  {
    Transaction open(feedback, {{"w", 2}});
    EXPECT_NE(refusal([&] { Transaction(feedback, {{"v", 1}, {"w", 2}}); }).find("'w'"),
              std::string::npos);
    EXPECT_NE(refusal([&] { feedback.add("w", Values{1, 1}); }), "");
    EXPECT_NE(refusal([&] { feedback.scale(2); }), "");
    EXPECT_NE(refusal([&] { feedback.clear(); }), "");
    Transaction other(feedback, {{"v", 1}});  // the refused call left it closed
    open.settle(true);
  }
  EXPECT_EQ(feedback.residual("w"), (Values{0, 0}));
  EXPECT_NE(refusal([&] { Transaction(feedback, {{"w", 2}, {"w", 2}}); }), "");
  EXPECT_EQ(refusal([&] { Transaction(feedback, {{"w", 2}}); }), "");
}

TEST(ErrorFeedback, AnotherLengthIsRefusedWithBoth) {
  ErrorFeedback feedback;
  feedback.add("w", Values(12));
  for (const auto& message : {refusal([&] { Transaction(feedback, {{"w", 345}}); }),
                              refusal([&] { feedback.add("w", Values(345)); })}) {
    EXPECT_NE(message.find("12"), std::string::npos) << message;
    EXPECT_NE(message.find("345"), std::string::npos) << message;
  }
  feedback.clear();
  EXPECT_EQ(refusal([&] { Transaction(feedback, {{"w", 345}}); }), "");
}

TEST(ErrorFeedback, AddAccumulatesAndScaleMultiplies) {
  ErrorFeedback feedback;
  feedback.add("w", Values{1, 2});
  feedback.add("w", Values{10, 20});
  feedback.add("v", Values{-4});
  feedback.scale(0.5);
  EXPECT_EQ(feedback.residual("w"), (Values{5.5F, 11}));
  EXPECT_EQ(feedback.residual("v"), (Values{-2}));
  EXPECT_TRUE(feedback.residual("unknown").empty());
  EXPECT_NE(refusal([&] { feedback.scale(std::nan("")); }), "");
}

// One step of a rank that feeds back: sends the codec's best of x + e, keeps the rest.
Values send(const Codec& codec, ErrorFeedback& feedback, const std::string& key, const Values& x) {
  Transaction transaction(feedback, {{key, x.size()}});
  const auto residual = transaction.residual(0);
  Values sum = x, delivered(x.size());
  for (std::size_t i = 0; i < residual.size(); ++i) sum[i] += residual[i];
  std::vector<std::byte> payload(codec.max_bytes(x.size()));
  Site site;
  site.error = transaction.next(0).data();
  codec.encode(sum.data(), x.size(), site, payload);
  codec.decode(payload, delivered.data(), x.size());
  transaction.settle(true);
  return delivered;
}

TEST(ErrorFeedback, TheCallsOfAStepStandOrFallTogether) {
  ErrorFeedback feedback;
  const auto call = [&](const std::string& key, float value, bool keep) {
    Transaction transaction(feedback, {{key, 1}});
    book(transaction, 0, {value});
    transaction.adapted(0).value = value;
    transaction.next_memory(0).assign(3, value);
    transaction.settle(keep);
  };
  const auto kept = [&](const std::string& key) {
    const auto entry = feedback.save(key);
    EXPECT_EQ(entry.memory, Values(entry.residual.empty() ? 0 : 3, entry.adapted));
    return entry.adapted;
  };
  feedback.begin_step();
  call("a", 1, true);
  call("b", 2, true);
  EXPECT_NE(refusal([&] { call("a", 3, true); }), "");  // open until the step ends
  EXPECT_EQ(kept("a"), 0);
  EXPECT_TRUE(feedback.end_step());
  EXPECT_EQ(kept("a"), 1);
  EXPECT_EQ(kept("b"), 2);

  feedback.begin_step();
  call("a", 3, true);
  call("b", 4, false);
  EXPECT_FALSE(feedback.end_step());
  EXPECT_EQ(kept("a"), 1);
  EXPECT_EQ(kept("b"), 2);

  feedback.begin_step();
  call("a", 5, true);
  EXPECT_FALSE(feedback.end_step(/*keep=*/false));
  EXPECT_EQ(kept("a"), 1);
  call("a", 6, true);
  EXPECT_EQ(kept("a"), 6);
}

TEST(ErrorFeedback, AStepBeginsAndEndsBetweenCalls) {
  ErrorFeedback feedback;
  EXPECT_NE(refusal([&] { feedback.end_step(); }), "");
  Transaction early(feedback, {{"w", 1}});
  EXPECT_NE(refusal([&] { feedback.begin_step(); }), "");
  early.settle(true);
  feedback.begin_step();
  EXPECT_NE(refusal([&] { feedback.begin_step(); }), "");
  Transaction late(feedback, {{"w", 1}});
  EXPECT_NE(refusal([&] { feedback.end_step(); }), "");
  late.settle(true);
  EXPECT_TRUE(feedback.end_step());
}

TEST(ErrorFeedback, WhatACodecRemembersStaysWhereAnotherOneRuns) {
  ErrorFeedback feedback;
  for (const Values& memory : {Values{1}, Values{2, 2}}) {
    Transaction transaction(feedback, {{"w", 1}});
    transaction.next_memory(0) = memory;
    transaction.settle(true);
  }
  Transaction other(feedback, {{"w", 1}});
  other.settle(true);
  EXPECT_EQ(feedback.save("w").memory, (Values{2, 2}));
  const auto kept = feedback.save("w");
  ErrorFeedback loaded;
  loaded.load("w", kept);
  EXPECT_EQ(loaded.save("w").memory, kept.memory);
  EXPECT_EQ(loaded.residual("w"), kept.residual);
}

TEST(ErrorFeedback, NothingIsLostOverAHundredSteps) {
  constexpr std::size_t kCount = 1000;
  for (const char* spec : {"fp16", "fp16:scale=0.0078125", "bf16"}) {
    const auto codec = make_codec(spec);
    ErrorFeedback feedback;
    std::mt19937_64 random(5);
    std::normal_distribution<float> normal;
    std::vector<double> given(kCount), delivered(kCount), rounding(kCount);
    for (int step = 0; step < 100; ++step) {
      Values x(kCount), residual = feedback.residual("w");
      residual.resize(kCount);
      for (float& value : x) value = normal(random);
      const Values y = send(*codec, feedback, "w", x);
      for (std::size_t i = 0; i < kCount; ++i) {
        given[i] += x[i];
        delivered[i] += y[i];
        rounding[i] += std::fabs(x[i] + residual[i]) * 0x1p-24;  // of x + e, the one inexact step
      }
    }
    const Values left = feedback.residual("w");
    double undelivered = 0, allowed = 0;
    for (std::size_t i = 0; i < kCount; ++i) {
      ASSERT_NEAR(delivered[i] + left[i], given[i], 1.001 * rounding[i]) << spec;
      undelivered += std::fabs(given[i] - delivered[i]);
      allowed += rounding[i];
    }
    EXPECT_GT(undelivered, 4 * allowed) << spec << ": too little is lost for this test to see it";
  }
}

TEST(ErrorFeedback, ThreadsUseTheirOwnKeysAtOnce) {
  ErrorFeedback feedback;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, key = "key" + std::to_string(t)] {
      for (int step = 0; step < 500; ++step) {
        Transaction transaction(feedback, {{key, 3}, {key + "b", 1}});
        const auto residual = transaction.residual(0);
        for (std::size_t i = 0; i < residual.size(); ++i) transaction.next(0)[i] = residual[i] + 1;
        if (step % 5 != 4) transaction.settle(true);
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(feedback.keys().size(), 8U);
  // 400 commits; the first one had no residual to add to.
  for (int t = 0; t < 4; ++t)
    EXPECT_EQ(feedback.residual("key" + std::to_string(t)), (Values{399, 399, 399}));
}

}  // namespace
}  // namespace gradwire::codec
