// NaN, Inf and sums that overflow, in whole collectives: every rank that receives a result sees it,
// and no residual moves on any rank.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <latch>

#include "exec_feedback_job.h"
#include "gradwire/base/error.h"

namespace gradwire::exec {
namespace exec_transaction_test {

constexpr int kRanks = 3;
constexpr std::size_t kCount = 2100, kBlock = kCount / kRanks;

// One bad element, in the block of rank 0.
constexpr std::size_t kBad = 5;

enum class Results : std::uint8_t { kFinite, kAllBad, kSomeBad };

Results look_at(const Values& y, std::size_t first, std::size_t count) {
  const auto bad = std::count_if(y.begin() + static_cast<std::ptrdiff_t>(first),
                                 y.begin() + static_cast<std::ptrdiff_t>(first + count),
                                 [](float each) { return !std::isfinite(each); });
  if (bad == 0) return Results::kFinite;
  return static_cast<std::size_t>(bad) == count ? Results::kAllBad : Results::kSomeBad;
}

// Spoils the input of a call, or the residuals it starts from; where values are as large as that,
// all ranks have them.
struct Evil {
  const char* what;
  std::function<void(Job&, std::vector<Values>&)> spoil;
};

const std::vector<Evil>& evils() {
  static const std::vector<Evil> all = {
      {"NaN", [](Job&, std::vector<Values>& x) { x[2][kBad] = NAN; }},
      {"Inf", [](Job&, std::vector<Values>& x) { x[1][kBad] = -INFINITY; }},
      {"the sum overflows",
       [](Job&, std::vector<Values>& x) {
         for (Values& each : x) {
           std::fill_n(each.begin(), kBlock, 3e38F);
           each[kBad] = 3.1e38F;  // first of all for topk
         }
       }},
      {"input and residual overflow",
       [](Job& job, std::vector<Values>& x) {
         Values large(kCount);
         large[kBad] = x[2][kBad] = 3e38F;
         job.feedback[2]->add("a", large);
       }},
  };
  return all;
}

// What they make of the largest float32 can be added three times.
bool sends_little(std::string_view codec) { return codec == "fp16" || codec == "threshold"; }

class Transactions : public testing::TestWithParam<Collective> {
 protected:
  static std::vector<Values> call(Job& job, const Case& how, const std::vector<Values>& x) {
    if (GetParam() == Collective::kAllReduce) return job.all_reduce(how, x);
    return job.reduce(GetParam(), how, x);
  }

  // Where only some ranks see what is bad, all of every result is.
  static void expect_bad(const std::vector<Values>& y) {
    for (std::size_t r = 0; r < y.size(); ++r) {
      if (GetParam() == Collective::kAllReduce) {
        EXPECT_NE(look_at(y[r], 0, kCount), Results::kFinite) << "rank " << r;
        EXPECT_FALSE(std::isfinite(y[r][kBad])) << "rank " << r;
      } else if (GetParam() == Collective::kReduceScatter) {
        EXPECT_EQ(look_at(y[r], r * kBlock, kBlock), Results::kAllBad) << "rank " << r;
      } else if (r == Job::kRoot) {
        EXPECT_EQ(look_at(y[r], 0, kCount), Results::kAllBad);
      }
    }
  }
};

TEST_P(Transactions, WhatIsNotFiniteIsSeenByAllAndMovesNoResidual) {
  for (const Case& how : cases())
    for (const Evil& evil : evils()) {
      if (sends_little(how.codec) && std::string_view(evil.what) == "the sum overflows") continue;
      SCOPED_TRACE(how.codec + " " + how.algorithm + ": " + evil.what);
      Job job(kRanks, {{"a", kCount}});
      std::vector<Values> x;
      for (int r = 0; r < kRanks; ++r) x.push_back(inputs(r, 0, kCount));
      call(job, how, x);
      evil.spoil(job, x);
      const std::vector<Values> before = job.residuals_of("a");
      expect_bad(call(job, how, x));
      EXPECT_EQ(job.residuals_of("a"), before);
    }
}

// The whole result, of which ranks may have blocks, without feedback.
Values result_of(Collective collective, const Case& how, const std::vector<Values>& x) {
  Job job(kRanks, {{"a", kCount}});
  job.feedback.assign(kRanks, nullptr);
  const auto y = collective == Collective::kAllReduce ? job.all_reduce(how, x)
                                                      : job.reduce(collective, how, x);
  if (collective == Collective::kReduce) return y[Job::kRoot];
  Values all = y[0];
  if (collective == Collective::kReduceScatter)
    for (std::size_t i = 0; i < kCount; ++i) all[i] = y[i / kBlock][i];
  return all;
}

// One rule for a codec, however its payloads travel: casts and lossless pass Inf on, of others a
// unit is NaN.
TEST_P(Transactions, InfAndSumsThatOverflowComeOutAlike) {
  const std::vector<Values> huge(kRanks, Values(kCount, 3e38F));
  std::vector<Values> inf(kRanks, Values(kCount, 1));
  inf[1][kBad] = INFINITY;
  for (const Case& how : cases()) {
    SCOPED_TRACE(how.codec + " " + how.algorithm);
    const bool cast = how.codec == "lossless" || codec::make_codec(how.codec)->block() == 1;
    const Values one = result_of(GetParam(), how, inf), all = result_of(GetParam(), how, huge);
    EXPECT_TRUE(cast ? std::isinf(one[kBad]) : std::isnan(one[kBad]));
    EXPECT_TRUE(cast ? one[kBad + 1] == kRanks : std::isnan(one[kBad + 1]));
    if (how.codec == "fp16") continue;  // what it sends of these is too small
    for (float each : all) ASSERT_TRUE(cast ? std::isinf(each) : std::isnan(each)) << each;
  }
}

INSTANTIATE_TEST_SUITE_P(Collectives, Transactions,
                         testing::Values(Collective::kAllReduce, Collective::kReduceScatter,
                                         Collective::kReduce),
                         [](const auto& each) { return std::string(name_of(each.param)); });

// ---- Calls that fail ---------------------------------------------------------------------------

std::vector<Case> failing_cases() {
  std::vector<Case> all;
  for (std::string_view codec : codec::codec_names())
    for (std::string_view algorithm : {"direct", "ring", "gather"}) {
      const auto combine = codec::make_codec(codec)->combine();
      if (algorithm != "gather" || combine == codec::Combine::kReencode)
        all.push_back({std::string(codec), std::string(algorithm)});
    }
  return all;
}

// This rank's side of some calls. Of two feedbacks, so that several can be pending.
struct Caller {
  Communicator& comm;
  const Case& how;
  double timeout;
  std::shared_ptr<ErrorFeedback> alone = std::make_shared<ErrorFeedback>();
  std::shared_ptr<ErrorFeedback> in_step = std::make_shared<ErrorFeedback>();
  std::vector<Values> arrays = {};

  std::shared_ptr<Work> submit(const std::shared_ptr<ErrorFeedback>& feedback, const char* key) {
    const std::vector<KeyedArray> keys = {{key, kCount}};
    const Shape shape{30, kCount / 30};
    arrays.push_back(inputs(comm.identity().rank, static_cast<int>(arrays.size()), kCount));
    const Array array = array_of(arrays.back());
    Request call;
    call.algorithm = how.algorithm;
    call.codec = codec::make_codec(how.codec);
    call.feedback = feedback;
    call.keys = keys;
    call.shapes = {&shape, 1};
    call.inputs = call.outputs = {&array, 1};
    call.timeout = timeout;
    return comm.submit(call);
  }
  void run(const std::shared_ptr<ErrorFeedback>& feedback, const char* key) {
    comm.wait(*submit(feedback, key), 10);
  }
};

// Calls to which rank 2 does not come, one of them in a step in which all had been well. That one
// may come when the other has failed, unless rank 2 waits for `submitted`.
template <typename Failure>
void expect_nothing_moves(Caller& caller, std::latch& submitted) {
  const Values kept[] = {caller.alone->residual("a"), caller.in_step->residual("a")};
  const auto first = caller.submit(caller.alone, "a");
  const auto submit_and_wait = [&] {
    const auto second = caller.submit(caller.in_step, "b");
    submitted.count_down();
    caller.comm.wait(*second, 10);
  };
  EXPECT_THROW(submit_and_wait(), Failure);
  EXPECT_THROW(caller.comm.wait(*first, 10), Failure);
  EXPECT_FALSE(caller.in_step->end_step());
  EXPECT_EQ(caller.alone->residual("a"), kept[0]);
  EXPECT_EQ(caller.in_step->residual("a"), kept[1]);
  EXPECT_TRUE(caller.in_step->residual("b").empty());
  EXPECT_NO_THROW(caller.alone->scale(1));  // nothing is open
}

template <typename Failure>
void fail(const Case& how, double timeout, bool vanishes) {
  Ranks ranks(kRanks, "inproc", Travel{}.tuning(), {}, /*mortal=*/vanishes);
  std::latch before(kRanks), submitted(2), over(2);
  ranks.run([&](Communicator& comm) {
    SCOPED_TRACE(how.codec + " " + how.algorithm);
    Caller caller{comm, how, 10};
    caller.arrays.reserve(5);
    caller.run(caller.alone, "a");
    caller.run(caller.in_step, "a");
    caller.in_step->begin_step();
    caller.run(caller.in_step, "a");
    before.arrive_and_wait();
    caller.timeout = timeout;
    if (comm.identity().rank < 2) {
      expect_nothing_moves<Failure>(caller, submitted);
      over.count_down();
    } else if (vanishes) {
      submitted.wait();
      ranks.vanish(2);
    }
    over.wait();
  });
}

TEST(FailedCalls, ARankThatVanishesMovesNoResidualOfTheOthers) {
  for (const Case& how : failing_cases()) fail<TransportError>(how, 10, /*vanishes=*/true);
}

// They wait at the same time, as nothing else is to be done.
TEST(FailedCalls, ATimeoutMovesNoResidual) {
  const auto cases = failing_cases();
  constexpr std::size_t kAtOnce = 12;
  for (std::size_t i = 0; i < cases.size(); i += kAtOnce) {
    std::vector<std::thread> jobs;
    for (std::size_t k = i; k < std::min(i + kAtOnce, cases.size()); ++k)
      jobs.emplace_back([&, k] { fail<Timeout>(cases[k], 0.05, /*vanishes=*/false); });
    for (std::thread& each : jobs) each.join();
  }
}

}  // namespace exec_transaction_test
}  // namespace gradwire::exec
