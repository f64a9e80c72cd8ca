#include "gradwire/exec/control/history.h"

#include <gtest/gtest.h>

#include <memory>

#include "gradwire/schedule/generators.h"

namespace gradwire::exec {
namespace exec_history_test {

std::shared_ptr<const Plan> plan_of(std::uint64_t count) {
  const schedule::Schedule schedule =
      schedule::generate({Collective::kAllReduce, "ring", 2, 0, {}});
  Binding binding;
  binding.spec.algorithm = "ring";
  binding.spec.counts = binding.counts = {count};
  binding.in_tree = true;
  binding.codec = codec::make_codec("none");
  binding.max_message = 4096;
  return std::make_shared<const Plan>(schedule, std::move(binding));
}

TEST(CallHistory, FramesTellOfThisCallAndOfAllBefore) {
  const auto a = plan_of(3), b = plan_of(4);
  CallHistory one, other;
  EXPECT_EQ(one.fingerprint_of_next(*a, {}), a->fingerprint());
  one.add(a);
  other.add(b);
  EXPECT_NE(one.fingerprint_of_next(*a, {}), other.fingerprint_of_next(*a, {}));
}

TEST(CallHistory, ComparesShapesWhereThereAreSome) {
  const auto plan = plan_of(6);
  CallHistory one, other;
  one.add(plan, {1, "(2, 3)"});
  other.add(plan, {2, "(3, 2)"});
  EXPECT_NE(one.after(1)->digest, other.after(1)->digest);
  EXPECT_NE(one.after(1)->fingerprint, other.after(1)->fingerprint);
  EXPECT_NE(one.after(1)->text().find("of shape (2, 3)"), std::string::npos);
}

TEST(SeenShapes, KnowsAShapeAgain) {
  SeenShapes seen;
  EXPECT_TRUE(seen.add(7));
  EXPECT_FALSE(seen.add(7));
  EXPECT_TRUE(seen.add(7 + 1024));  // which takes its place
  EXPECT_TRUE(seen.add(7));
}

TEST(Plan, SaysWhereEveryRankHearsOfAll) {
  EXPECT_TRUE(plan_of(3)->confirms_all_ranks());
  EXPECT_EQ(plan_of(3)->bytes_to(1), plan_of(3)->bytes_from(1));
}

}  // namespace exec_history_test
}  // namespace gradwire::exec
