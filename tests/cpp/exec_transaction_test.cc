// NaN, Inf and sums that overflow, in whole collectives: every rank that receives a result sees it,
// and no residual moves on any rank (contracts 1, transaction).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "exec_feedback_job.h"

namespace gradwire::exec {
namespace {

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

INSTANTIATE_TEST_SUITE_P(Collectives, Transactions,
                         testing::Values(Collective::kAllReduce, Collective::kReduceScatter,
                                         Collective::kReduce),
                         [](const auto& each) { return std::string(name_of(each.param)); });

}  // namespace
}  // namespace gradwire::exec
