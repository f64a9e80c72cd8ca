// What algorithm="auto" means: the cost model's choice, which all ranks must share.
#include <gtest/gtest.h>

#include "exec_ranks.h"
#include "gradwire/base/error.h"
#include "gradwire/exec/plan/plan_cache.h"

namespace gradwire::exec {
namespace exec_auto_test {

// A model under which messages cost much and bytes little, or the other way round.
schedule::CostModel model_of(double alpha, double move) {
  auto model = built_in_model("shm", "tcp", 64);
  model.set("within.alpha", alpha);
  model.set("move", move);
  return model;
}

schedule::CostModel dear_messages() { return model_of(1e-3, 1e-13); }
schedule::CostModel dear_bytes() { return model_of(1e-9, 1e-6); }

std::string name_of_plan(PlanCache& plans, std::uint64_t elements) {
  std::vector<float> values(elements);
  const Array arrays[] = {array_of(values)};
  Request request;
  request.inputs = request.outputs = arrays;
  return plans.find(request, {})->spec().algorithm;
}

TEST(Auto, IsDecidedByTheModel) {
  PlanCache plans({0, 8, {}, 256 * 1024, 0});
  plans.set_model(dear_messages());
  EXPECT_EQ(name_of_plan(plans, 10'000), "recursive_doubling");
  plans.set_model(dear_bytes());
  EXPECT_EQ(name_of_plan(plans, 10'000), "direct");
}

// The largest payload of onebit has a mask of zeros, and is nearly twice the usual one.
TEST(Auto, CountsTheUsualPayloadOfACodec) {
  const auto model = built_in_model("shm", "tcp", 64);
  schedule::Question question;
  question.bytes = 4 << 20;
  ask_for(*codec::make_codec("onebit"), model, question);
  EXPECT_LT(question.ratio, 0.04);
  EXPECT_GT(question.ratio, 1 / 32.0);
}

TEST(Auto, SegmentsAreTheCallersWhereHeSaysSo) {
  for (const std::size_t wish : {std::size_t{0}, std::size_t{4096}}) {
    PlanCache plans({0, 2, {}, 256 * 1024, wish});
    std::vector<float> values(1 << 20);
    const Array arrays[] = {array_of(values)};
    Request request;
    request.inputs = request.outputs = arrays;
    const auto plan = plans.find(request, {});
    std::uint64_t most = 0;
    for (const Frame& frame : plan->sends()) most = std::max(most, frame.bytes);
    EXPECT_LE(most, wish == 0 ? 256 * 1024 : wish);
    EXPECT_GE(most, wish == 0 ? 8 * 1024 : wish / 2);
  }
}

// The bytes of an all_reduce of `elements` that rank 0 of four hosts sends.
std::uint64_t sent_between_hosts(std::uint64_t elements, bool spares_bytes) {
  PlanCache plans({0, 4, {{0}, {1}, {2}, {3}}, 256 * 1024, 0});
  std::vector<float> values(elements);
  const Array arrays[] = {array_of(values)};
  Request request;
  request.inputs = request.outputs = arrays;
  request.spares_bytes = spares_bytes;
  const auto plan = plans.find(request, {});
  std::uint64_t sent = 0;
  for (const SendFrame& frame : plan->sends()) sent += frame.bytes * plan->peers(frame).size();
  return sent;
}

TEST(Auto, CallsThatSpareBytesSendAsFewAsCanBe) {
  for (const std::uint64_t elements : {1200, 4000, 12000, 40000})
    EXPECT_LE(sent_between_hosts(elements, true), elements * sizeof(float) * 3 / 2) << elements;
  EXPECT_GT(sent_between_hosts(1200, false), 1200 * sizeof(float) * 3 / 2);
}

TEST(Auto, ARankWithAnotherModelIsNamedAndNobodyHangs) {
  Ranks ranks(3);
  const auto outcomes = ranks.outcomes([](Communicator& comm) {
    comm.set_model(comm.identity().rank == 1 ? dear_bytes() : dear_messages());
    std::vector<float> values(1000, 1.0F);
    const Array arrays[] = {array_of(values)};
    Request request;
    request.inputs = request.outputs = arrays;
    request.algorithm = "ring";  // for which no model is asked
    comm.run(request);
    EXPECT_EQ(values, std::vector<float>(1000, 3.0F));
    request.algorithm = "auto";
    comm.run(request);
  });
  for (const auto& outcome : outcomes) {
    ASSERT_TRUE(outcome);
    try {
      std::rethrow_exception(outcome);
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("by cost model #"), std::string::npos);
    }
  }
}

}  // namespace exec_auto_test
}  // namespace gradwire::exec
