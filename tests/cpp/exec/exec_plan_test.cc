// Plans that the generators' schedules and even buffers do not lead to.
#include <gtest/gtest.h>

#include "exec_ranks.h"
#include "gradwire/base/error.h"
#include "gradwire/base/wire.h"
#include "gradwire/exec/plan/plan_cache.h"
#include "gradwire/schedule/generators.h"
#include "gradwire/schedule/schedule.h"

namespace gradwire::exec {
namespace exec_plan_test {

TEST(Plan, AFinishedChunkMayComeBackToTheRankThatFinishedIt) {
  schedule::Builder builder(/*ranks=*/2, /*chunks=*/1);
  builder.reduce(0, 1, 0, {0, 1});
  builder.copy(1, 0, 1, {0, 1});
  builder.copy(2, 1, 0, {0, 1});
  const auto schedule = std::move(builder).build(Collective::kAllReduce, "there_and_back");
  for (const char* codec : {"none", "fp16"}) {
    Ranks ranks(2);
    ranks.run([&](Communicator& comm) {
      std::vector<float> values(100, comm.identity().rank == 0 ? 1.0F : 4.0F);
      const Array arrays[] = {array_of(values)};
      Request request;
      request.op = ReduceOp::kAvg;
      request.schedule = &schedule;
      request.schedule_digest = schedule::digest(schedule);
      request.codec = codec::make_codec(codec);
      request.inputs = request.outputs = arrays;
      comm.run(request);
      EXPECT_EQ(values, std::vector<float>(100, 2.5F)) << codec;
    });
  }
}

// A scalar takes a unit as 16 elements of an array do, so segments are of unlike bytes.
TEST(Plan, EverySegmentFitsItsMessageBesideManyScalars) {
  constexpr std::size_t kScalars = 1000, kLong = 24000;
  Tuning tuning;
  tuning.max_message = 64 * 1024;
  Ranks ranks(2, "inproc", tuning);
  ranks.run([&](Communicator& comm) {
    std::vector<float> values(3 * kScalars + 2 * kLong, 1.0F);
    std::vector<Array> arrays;
    std::size_t at = 0;
    const auto add = [&](std::size_t count) {
      arrays.push_back({reinterpret_cast<std::byte*>(&values[at]), count});
      at += count;
    };
    for (int block = 0; block < 3; ++block) {
      for (std::size_t i = 0; i < kScalars; ++i) add(1);
      if (block < 2) add(kLong);
    }
    Request request;
    request.algorithm = "star";
    request.inputs = request.outputs = arrays;
    comm.run(request);
    EXPECT_EQ(values, std::vector<float>(values.size(), 2.0F));
  });
}

// Two segments of three cache lines are of one and two, which is too long: so there are three.
TEST(Plan, SegmentsBecomeMoreUntilTheLongestFits) {
  const auto segments = [](std::size_t room) {
    Binding binding;
    binding.counts = {48};
    binding.codec = codec::make_codec("none");
    binding.max_message = room + sizeof(FrameHeader);
    return Plan(schedule::generate({Collective::kAllReduce, "star", 2, 0, {}}), binding).segments();
  };
  EXPECT_EQ(segments(192), 1);
  EXPECT_EQ(segments(128), 2);
  EXPECT_EQ(segments(120), 3);
  EXPECT_EQ(segments(64), 3);
  EXPECT_THROW(segments(63), ScheduleError);
}

Binding binding_of(std::uint64_t count, Rank rank = 0) {
  Binding binding;
  binding.counts = {count};
  binding.codec = codec::make_codec("none");
  binding.max_message = 1 << 20;
  binding.rank = rank;
  return binding;
}

// Two ranks of a host exchange 16 chunks at once, in four frames. Between hosts a message is one
// chunk of 8 KiB, which is not cut, too: else it would cost four times as much to send.
TEST(Plan, AChunkAloneIsNotCutAsOftenAsAMessageOfMany) {
  constexpr int kHosts = 16;
  std::vector<std::vector<Rank>> hosts;
  for (int h = 0; h < kHosts; ++h) hosts.push_back({2 * h, 2 * h + 1});
  const auto schedule = schedule::generate(
      {Collective::kAllReduce, "hierarchical(direct,ring)", 2 * kHosts, 0, hosts});
  for (Rank rank : {0, 1, 31}) {
    const Plan plan(schedule, binding_of(1 << 16, rank));
    EXPECT_EQ(plan.segments(), 4);
    const auto check = [&](const auto& frames) {
      EXPECT_EQ(frames.size(), 4 + 2 * (kHosts - 1) + 4);
      for (const Frame& frame : frames) {
        const bool within = plan.peers(frame)[0] / 2 == rank / 2;
        EXPECT_EQ(frame.segments, within ? 4 : 1);
        EXPECT_EQ(frame.bytes, (within ? 4 : 1) * 8 * 1024U);
      }
    };
    check(plan.sends());
    check(plan.receives());
  }
}

TEST(Plan, EmptyArraysTravelInOneSegment) {
  const auto schedule = schedule::generate({Collective::kAllReduce, "ring", 2, 0, {}});
  EXPECT_EQ(Plan(schedule, binding_of(0)).segments(), 1);
  EXPECT_FALSE(Plan(schedule, binding_of(0)).sends().empty());
}

TEST(Plan, ASumOfOneRankHasNothingToFinish) {
  const auto schedule = schedule::generate({Collective::kReduce, "star", 2, 0, {}});
  Binding binding = binding_of(100);
  binding.spec.collective = Collective::kReduce;
  binding.in_tree = true;
  EXPECT_TRUE(Plan(schedule, binding).finished_here().empty());
  binding.spec.op = ReduceOp::kAvg;
  EXPECT_FALSE(Plan(schedule, binding).finished_here().empty());
}

TEST(Plan, RefusesAnOpThatTheTypeHasNot) {
  Binding binding = binding_of(100);
  binding.spec.op = ReduceOp::kBand;
  EXPECT_THROW(Plan(schedule::generate({Collective::kAllReduce, "ring", 2, 0, {}}), binding),
               InvalidArgument);
}

TEST(Plan, TellsWhichCallItIsFor) {
  const auto schedule = schedule::generate({Collective::kAllReduce, "ring", 2, 0, {}});
  Binding binding = binding_of(100);
  binding.spec.algorithm = "ring";
  binding.spec.codec = "none";
  binding.spec.counts = {100};
  const Plan plan(schedule, binding);
  EXPECT_EQ(plan.text(), "all_reduce(float32[100], op=sum, algorithm=ring, codec=none)");
  EXPECT_EQ(plan.fingerprint(), binding.spec.fingerprint());
}

TEST(Plan, HasAsManyRoundsAsFramesCanNumber) {
  auto schedule = schedule::generate({Collective::kAllReduce, "star", 2, 0, {}});
  schedule.rounds.resize(65535);
  EXPECT_EQ(Plan(schedule, binding_of(100)).sends().size(), 1U);
  schedule.rounds.emplace_back();
  EXPECT_THROW(Plan(schedule, binding_of(100)), ScheduleError);
}

TEST(Plan, NamesTheOpsThatAreDefined) {
  for (const DType dtype : {DType::kFloat32, DType::kInt32, DType::kInt8}) {
    std::string defined;
    for (int i = 0; i < kReduceOps; ++i)
      if (const auto op = static_cast<ReduceOp>(i); is_defined(op, dtype))
        defined += (defined.empty() ? "" : ", ") + std::string(name_of(op));
    for (int i = 0; i < kReduceOps; ++i) {
      const auto op = static_cast<ReduceOp>(i);
      try {
        check_types(Collective::kAllReduce, dtype, op, *codec::make_codec("none"));
        EXPECT_TRUE(is_defined(op, dtype));
      } catch (const InvalidArgument& error) {
        EXPECT_FALSE(is_defined(op, dtype));
        EXPECT_NE(std::string(error.what()).find("use one of: " + defined), std::string::npos);
      }
    }
  }
}

// Addends of the same elements stand one after the other, and what they add up to is sent next.
TEST(Plan, KnowsWhichFramesAddToTheSameElements) {
  constexpr int kRanks = 4;
  const auto addends_of = [&](std::string_view algorithm, const char* codec) {
    const auto schedule =
        schedule::generate({Collective::kAllReduce, std::string(algorithm), kRanks, 0, {}});
    Binding binding;
    binding.counts = {1000};
    binding.codec = codec::make_codec(codec);
    binding.in_tree = true;
    binding.max_message = 64 * 1024;
    const Plan plan(schedule, binding);
    std::vector<std::uint32_t> addends;
    for (const ReceiveFrame& frame : plan.receives()) addends.push_back(frame.addends);
    for (const SendFrame& frame : plan.sends()) addends.push_back(frame.sends_sum ? 1 : 0);
    return addends;
  };
  using List = std::vector<std::uint32_t>;
  EXPECT_EQ(addends_of("direct", "none"), (List{3, 2, 1, 0, 0, 0, /*sends:*/ 0, 0, 0, 1}));
  EXPECT_EQ(addends_of("ring", "none"), (List{1, 1, 1, 0, 0, 0, /*sends:*/ 0, 1, 1, 1, 0, 0}));
  EXPECT_EQ(addends_of("direct", "fp16"), List(10, 0));
}

// One more shape than the cache keeps, in turn.
TEST(PlanCache, KeepsMostPlansOfOneShapeTooMany) {
  constexpr std::size_t kShapes = 257, kRounds = 4;
  PlanCache plans({0, 2, {}, kUsualFrame, 0});
  std::vector<std::shared_ptr<const Plan>> found(kShapes);
  std::size_t made = 0;
  for (std::size_t call = 0; call < kRounds * kShapes; ++call) {
    const std::size_t shape = call % kShapes;
    const Array arrays[] = {{nullptr, shape + 1}};
    Request request;
    request.inputs = request.outputs = arrays;
    request.algorithm = "ring";
    const auto plan = plans.find(request, {-1, 0});
    if (std::exchange(found[shape], plan) != plan) ++made;
  }
  EXPECT_LT(made, kShapes + kShapes / 4);
}

}  // namespace exec_plan_test
}  // namespace gradwire::exec
