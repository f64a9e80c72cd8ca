#include "gradwire/codec/feedback/feedback.h"

#include <gtest/gtest.h>
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gradwire/base/error.h"
#include "gradwire/codec/codec.h"
#include "gradwire/codec/simd/float_modes.h"

namespace gradwire::codec {
namespace codec_feedback_test {

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

void book(Transaction& transaction, std::size_t array, const Values& values) {
  keep(transaction.context(array), values.data(), values.size());
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
  EXPECT_EQ(transaction.size(0), 1U);
  EXPECT_EQ(transaction.size(1), 3U);
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

TEST(ErrorFeedback, SetReplacesAndMultiplyTakesAFactorForEachElement) {
  ErrorFeedback feedback;
  feedback.set("w", Values{1, 2});
  feedback.set("w", Values{3, -5});
  feedback.multiply("w", Values{2, 0.5F});
  EXPECT_EQ(feedback.residual("w"), (Values{6, -2.5F}));
  EXPECT_NE(refusal([&] { feedback.set("w", Values{1}); }), "");
  EXPECT_NE(refusal([&] { feedback.multiply("w", Values{1e38F, 1e38F}); }), "");
  const Transaction open(feedback, {{"w", 2}});
  EXPECT_NE(refusal([&] { feedback.set("w", Values{1, 1}); }), "");
  EXPECT_EQ(feedback.residual("w"), (Values{6, -2.5F}));
}

// One step of a rank that feeds back: sends the codec's best of x + e, keeps the rest.
Values send(const Codec& codec, ErrorFeedback& feedback, const std::string& key, const Values& x) {
  Transaction transaction(feedback, {{key, x.size()}});
  Values delivered(x.size());
  std::vector<std::byte> payload(codec.max_bytes(x.size()));
  encode(codec, x.data(), x.size(), transaction.context(0), payload);
  codec.decode(payload, delivered.data(), x.size());
  transaction.settle(true);
  return delivered;
}

TEST(ErrorFeedback, MaskLeavesTheValuesOfWhichSomethingWaits) {
  ErrorFeedback feedback;
  const float denormal = std::numeric_limits<float>::denorm_min();
  feedback.add("w", Values{0, -0.0F, 3, denormal});
  Values values{1, std::numeric_limits<float>::infinity(), 3, 4};
  feedback.mask("w", values);
  EXPECT_EQ(values, (Values{0, 0, 3, 4}));
  feedback.mask("unused", values);
  EXPECT_EQ(values, (Values{0, 0, 0, 0}));
  Values longer(5);
  EXPECT_NE(refusal([&] { feedback.mask("w", longer); }), "");
}

TEST(ErrorFeedback, TheCallsOfAStepStandOrFallTogether) {
  ErrorFeedback feedback;
  const auto call = [&](const std::string& key, float value, bool keep) {
    Transaction transaction(feedback, {{key, 1}});
    book(transaction, 0, {value});
    transaction.context(0).codec_state->tau = value;
    transaction.next_memory(0).assign(3, value);
    transaction.settle(keep);
  };
  const auto kept = [&](const std::string& key) {
    const auto entry = feedback.save()[key];
    EXPECT_EQ(entry.memory, Values(entry.residual.empty() ? 0 : 3, entry.codec_state.tau));
    return entry.codec_state.tau;
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

// Whichever of its calls is not to be kept, the first one too.
TEST(ErrorFeedback, AStepIsKeptWhereAllItsCallsAreInAnyOrder) {
  constexpr unsigned kCalls = 3, kAll = (1U << kCalls) - 1;
  for (unsigned kept = 0; kept <= kAll; ++kept) {  // a bit for each call
    ErrorFeedback feedback;
    feedback.begin_step();
    for (unsigned call = 0; call < kCalls; ++call) {
      Transaction transaction(feedback, {{std::to_string(call), 1}});
      book(transaction, 0, {1});
      transaction.settle((kept & (1U << call)) != 0);
    }
    EXPECT_EQ(feedback.end_step(), kept == kAll) << kept;
    EXPECT_EQ(feedback.keys().size(), kept == kAll ? kCalls : 0U);
  }
}

TEST(ErrorFeedback, AStepBeginsAndEndsBetweenCalls) {
  ErrorFeedback feedback;
  Transaction early(feedback, {{"w", 1}});
  EXPECT_NE(refusal([&] { feedback.end_step(); }).find("no step was begun"), std::string::npos);
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
  EXPECT_EQ(feedback.save()["w"].memory, (Values{2, 2}));
}

// What of v = x + residual a codec sends; the rest becomes the residual.
std::size_t count_sent(const Codec& codec, ErrorFeedback& feedback, const Values& x) {
  Transaction transaction(feedback, {{"w", x.size()}});
  const EncodeContext context = transaction.context(0);
  std::vector<std::byte> payload(codec.max_bytes(x.size()));
  Values y(x.size());
  codec.prepare(x.data(), x.size(), context);
  codec.encode(x.data(), x.size(), context, payload);
  codec.adapt(x.size(), *context.codec_state);
  codec.decode(payload, y.data(), x.size());
  transaction.settle(true);
  return x.size() - static_cast<std::size_t>(std::count(y.begin(), y.end(), 0.0F));
}

Values normal(std::size_t n, unsigned seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> draw;
  Values x(n);
  for (float& each : x) each = draw(random);
  return x;
}

TEST(ErrorFeedback, WhatOneCodecAdaptsIsNotTakenForAnothers) {
  const auto topk = make_codec("topk:density=0.1"), threshold = make_codec("threshold");
  ErrorFeedback feedback;
  for (unsigned call = 0; call < 3; ++call) count_sent(*topk, feedback, normal(50'000, call));
  const float filter = feedback.save()["w"].codec_state.filter;
  EXPECT_GT(filter, 0);
  EXPECT_NEAR(static_cast<double>(count_sent(*threshold, feedback, normal(50'000, 3))), 50, 1);
  const float tau = feedback.save()["w"].codec_state.tau;
  EXPECT_GT(tau, 0);
  EXPECT_EQ(feedback.save()["w"].codec_state.filter, filter);
  EXPECT_EQ(count_sent(*topk, feedback, normal(50'000, 4)), 5000U);
  EXPECT_EQ(feedback.save()["w"].codec_state.tau, tau);
}

TEST(ErrorFeedback, NumbersTellItsCallsApart) {
  ErrorFeedback feedback;
  const auto call = [](ErrorFeedback& of, const std::string& key, bool keep) {
    Transaction transaction(of, {{key, 1}});
    const std::uint64_t number = transaction.context(0).call;
    book(transaction, 0, {1});
    transaction.settle(keep);
    return number;
  };
  const std::uint64_t first = call(feedback, "a", true), second = call(feedback, "a", false);
  EXPECT_NE(second, first);
  EXPECT_EQ(call(feedback, "a", true), second) << "after a rollback";
  EXPECT_NE(call(feedback, "b", true), first);
  feedback.begin_step();
  const std::uint64_t third = call(feedback, "a", true);
  feedback.end_step(/*keep=*/false);
  ErrorFeedback loaded;
  loaded.load(feedback.save());
  EXPECT_EQ(call(loaded, "a", true), third);
  EXPECT_EQ(call(feedback, "a", true), third);
}

ErrorFeedback::SavedKey kept_of(float value) {
  return {Values(3, value), {.tau = value, .filter = value}, 7, Values(2, value)};
}

bool same(const ErrorFeedback::State& a, const ErrorFeedback::State& b) {
  return std::ranges::equal(a, b, [](const auto& x, const auto& y) {
    return x.first == y.first && x.second.residual == y.second.residual &&
           x.second.memory == y.second.memory && x.second.calls == y.second.calls &&
           x.second.codec_state.tau == y.second.codec_state.tau &&
           x.second.codec_state.filter == y.second.codec_state.filter;
  });
}

TEST(ErrorFeedback, LoadedIsWhatWasSaved) {
  ErrorFeedback feedback, other;
  feedback.load({{"a", kept_of(1)}, {"b", kept_of(2)}});
  other.add("c", Values{1});
  other.load(feedback.save());
  EXPECT_TRUE(same(other.save(), {{"a", kept_of(1)}, {"b", kept_of(2)}}));
}

TEST(ErrorFeedback, ABadStateIsRefusedWhole) {
  ErrorFeedback feedback;
  feedback.load({{"a", kept_of(1)}});
  const auto before = feedback.save();
  for (float value : {NAN, INFINITY, -INFINITY}) {
    std::vector<ErrorFeedback::SavedKey> bad(4, kept_of(1));
    bad[0].residual[1] = bad[1].memory[1] = bad[2].codec_state.tau = bad[3].codec_state.filter =
        value;
    for (const auto& each : bad) {
      EXPECT_NE(refusal([&] { feedback.load({{"a", kept_of(5)}, {"b", each}}); }).find("'b'"),
                std::string::npos);
      EXPECT_TRUE(same(feedback.save(), before));
    }
  }
  Transaction open(feedback, {{"x", 3}});
  EXPECT_NE(refusal([&] { feedback.load({{"b", kept_of(5)}}); }), "");
  EXPECT_TRUE(same(feedback.save(), before));
}

TEST(ErrorFeedback, WhatIsTakenAndPutBackIsWhatWasThere) {
  ErrorFeedback feedback;
  feedback.load({{"a", kept_of(1)}, {"b", kept_of(2)}});
  const auto before = feedback.save();
  EXPECT_TRUE(same({{"b", feedback.take("b")}}, {{"b", kept_of(2)}}));
  EXPECT_TRUE(same(feedback.save(), {{"a", kept_of(1)}}));
  EXPECT_TRUE(same({{"b", feedback.take("b")}}, {{"b", {}}})) << "as if it was never used";
  feedback.put("b", kept_of(2));
  EXPECT_TRUE(same(feedback.save(), before));
  auto bad = kept_of(3);
  bad.residual[2] = NAN;
  EXPECT_NE(refusal([&] { feedback.put("b", bad); }), "");
  Transaction open(feedback, {{"a", 3}});
  EXPECT_NE(refusal([&] { feedback.take("a"); }), "");
  EXPECT_NE(refusal([&] { feedback.put("a", kept_of(3)); }), "");
  EXPECT_TRUE(same(feedback.save(), before));
}

TEST(ErrorFeedback, WhatIsSavedHoldsNothingOfUnfinishedCalls) {
  ErrorFeedback feedback;
  feedback.load({{"a", kept_of(1)}, {"b", kept_of(2)}});
  const auto before = feedback.save();
  feedback.begin_step();
  for (const char* key : {"a", "b", "c"}) {
    Transaction transaction(feedback, {{key, 3}});
    book(transaction, 0, {4, 5, 6});
    *transaction.context(0).codec_state = {.tau = 8, .filter = 9};
    transaction.next_memory(0).assign(2, 7);
    EXPECT_TRUE(same(feedback.save(), before));
    transaction.settle(true);
    EXPECT_TRUE(same(feedback.save(), before));
  }
  feedback.end_step();
  EXPECT_EQ(feedback.save().size(), 3U);
}

TEST(ErrorFeedback, NothingBecomesInfinite) {
  const float most = std::numeric_limits<float>::max();
  ErrorFeedback feedback;
  feedback.add("a", Values{1, -1});
  feedback.add("w", Values{most / 2, -1});
  const auto before = feedback.save();
  EXPECT_NE(refusal([&] { feedback.scale(3); }).find("'w'"), std::string::npos);
  for (const Values& values :
       {Values{most, 0}, Values{0, NAN}, Values{INFINITY, 0}, Values{0, -INFINITY}})
    EXPECT_NE(refusal([&] { feedback.add("w", values); }).find("'w'"), std::string::npos);
  EXPECT_NE(refusal([&] { feedback.add("new", Values{NAN}); }), "");
  EXPECT_TRUE(same(feedback.save(), before));
  feedback.scale(2);
  EXPECT_EQ(feedback.residual("w"), (Values{most, -2}));
  EXPECT_EQ(feedback.residual("a"), (Values{2, -2}));
}

TEST(ErrorFeedback, TauIsScaledAndStaysFinite) {
  ErrorFeedback feedback;
  feedback.load({{"b", kept_of(1)}});
  feedback.scale(-2);
  EXPECT_EQ(feedback.save()["b"].codec_state.tau, 2);
  EXPECT_EQ(feedback.save()["b"].codec_state.filter, 2);
  EXPECT_EQ(feedback.residual("b"), Values(3, -2));
  feedback.load({{"b", {Values(1), {.tau = 1e30F}, 0, {}}}});
  feedback.scale(1e30);
  EXPECT_EQ(feedback.save()["b"].codec_state.tau, std::numeric_limits<float>::max());
}

// Whoever calls may have told the processor to flush them.
TEST(ErrorFeedback, DenormalsAreKept) {
  const std::uint64_t modes = float_modes();
  ErrorFeedback feedback;
  set_float_modes(modes | kFlushModes);
  feedback.add("w", Values{1e-40F, -1e-40F});
  feedback.add("w", Values{1e-40F, -1e-40F});
  feedback.scale(0.5);
  set_float_modes(modes);
  EXPECT_EQ(feedback.residual("w"), (Values{1e-40F, -1e-40F}));
}

TEST(ErrorFeedback, ACancelledCallHasNoPartInItsStep) {
  ErrorFeedback feedback;
  feedback.begin_step();
  {
    Transaction refused(feedback, {{"a", 1}, {"b", 1}});
    refused.cancel();
  }
  Transaction transaction(feedback, {{"a", 1}});
  book(transaction, 0, {1});
  transaction.settle(true);
  EXPECT_TRUE(feedback.end_step());
  EXPECT_EQ(feedback.residual("a"), Values{1});
  EXPECT_TRUE(feedback.residual("b").empty());
  Transaction alone(feedback, {{"a", 1}});
  book(alone, 0, {2});
  alone.cancel();
  EXPECT_EQ(feedback.residual("a"), Values{1});
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
        for (std::size_t i = 0; i < residual.size(); ++i)
          transaction.context(0).error[i] = residual[i] + 1;
        if (step % 5 != 4) transaction.settle(true);
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(feedback.keys().size(), 8U);
  // 400 commits; the first one had no residual to add to.
  for (int t = 0; t < 4; ++t)
    EXPECT_EQ(feedback.residual("key" + std::to_string(t)), (Values{399, 399, 399}));
}

}  // namespace codec_feedback_test
}  // namespace gradwire::codec
