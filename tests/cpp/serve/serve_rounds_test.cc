#include "gradwire/serve/shard/rounds.h"

#include "serve_requests.h"

namespace gradwire::serve {
namespace serve_rounds_test {

constexpr double kLong = 1000;  // seconds: longer than any test

TEST(Rounds, EndWhenAllHavePushed) {
  Rounds rounds({.quorum = 1, .grace = kLong});
  for (const ClientId each : {1, 2, 3}) rounds.join(each);
  rounds.push(1, 10, /*late=*/false);
  rounds.push(2, 20, /*late=*/false);
  rounds.push(2, 5, /*late=*/false);
  EXPECT_FALSE(rounds.over());
  rounds.push(3, 30, /*late=*/false);
  EXPECT_TRUE(rounds.over());
  EXPECT_EQ(rounds.weight(), 65);
  rounds.next();
  EXPECT_FALSE(rounds.over());
  EXPECT_EQ(rounds.weight(), 0);
}

TEST(Rounds, EndWithoutTheLateAfterTheGraceTimeOfAQuorum) {
  Rounds rounds({.quorum = 2, .grace = 0});
  for (const ClientId each : {1, 2, 3}) rounds.join(each);
  rounds.push(1, 1, /*late=*/false);
  EXPECT_FALSE(rounds.over());
  EXPECT_TRUE(rounds.due().is_never());
  rounds.push(2, 1, /*late=*/false);
  EXPECT_TRUE(rounds.over());
  EXPECT_FALSE(rounds.due().is_never());
  rounds.next();
  EXPECT_TRUE(rounds.due().is_never());
}

TEST(Rounds, WaitForALateClientOnceOnly) {
  Rounds rounds({.quorum = 2, .grace = 0});
  for (const ClientId each : {1, 2, 3}) rounds.join(each);
  rounds.push(1, 1, /*late=*/false);
  rounds.push(2, 1, /*late=*/false);
  EXPECT_TRUE(rounds.over());
  rounds.next();

  Rounds patient({.quorum = 1, .grace = kLong});
  for (const ClientId each : {1, 2}) patient.join(each);
  patient.push(1, 1, /*late=*/false);
  EXPECT_FALSE(patient.over());
  patient.next();  // as if the grace time were over
  patient.push(1, 1, /*late=*/false);
  EXPECT_TRUE(patient.over());  // without 2
  patient.next();
  patient.push(2, 1, /*late=*/false);  // which is back, late
  patient.push(1, 1, /*late=*/false);
  EXPECT_TRUE(patient.over());
  patient.next();
  patient.push(1, 1, /*late=*/false);
  EXPECT_FALSE(patient.over());  // and is waited for again
}

TEST(Rounds, WaitForAJoinerFromItsSecondRoundOn) {
  Rounds rounds({.quorum = 1, .grace = kLong});
  rounds.join(1);
  rounds.push(1, 1, /*late=*/false);
  rounds.next();
  rounds.join(2);
  rounds.push(1, 1, /*late=*/false);
  EXPECT_TRUE(rounds.over());
  rounds.next();
  rounds.push(1, 1, /*late=*/false);
  EXPECT_FALSE(rounds.over());
}

TEST(Rounds, GoOnWithoutWhoHasLeft) {
  Rounds rounds({.quorum = 3, .grace = kLong});
  for (const ClientId each : {1, 2, 3}) rounds.join(each);
  rounds.push(1, 4, /*late=*/false);
  rounds.push(2, 4, /*late=*/false);
  rounds.leave(2);
  EXPECT_FALSE(rounds.over());
  rounds.leave(3);
  EXPECT_TRUE(rounds.over());
  EXPECT_EQ(rounds.weight(), 8);  // what 2 had pushed counts
}

TEST(Rounds, GoOnAsIfALatePushHadNotCome) {
  Rounds rounds({.quorum = 1, .grace = 0});
  for (const ClientId each : {1, 2}) rounds.join(each);
  rounds.push(1, 1, /*late=*/true);
  EXPECT_FALSE(rounds.over());
  EXPECT_TRUE(rounds.due().is_never());
  rounds.push(1, 2, /*late=*/true);  // its second
  EXPECT_TRUE(rounds.over());
  EXPECT_EQ(rounds.weight(), 3);
  rounds.next();

  Rounds patient({.quorum = 1, .grace = kLong});
  for (const ClientId each : {1, 2}) patient.join(each);
  patient.push(1, 1, /*late=*/true);
  patient.push(2, 1, /*late=*/false);
  EXPECT_FALSE(patient.over());  // 1 is back, and is expected to push in time
  patient.push(1, 1, /*late=*/true);
  EXPECT_TRUE(patient.over());
}

TEST(Rounds, DoNotEndWithoutWeight) {
  Rounds rounds({.quorum = 1, .grace = 0});
  rounds.join(1);
  EXPECT_FALSE(rounds.over());
  rounds.push(1, 0, /*late=*/false);
  EXPECT_FALSE(rounds.over());
}

ParameterTable table_of_rounds(const std::string& options) {
  return some_table(1, "rounds:rate=0.5,momentum=0.75," + options);
}

// A push of a weight; Direct sends those of the rule's own, which is 1.
void push(Direct& job, ClientId client, const Arrays& g, std::uint64_t version = 0) {
  EXPECT_EQ(job.send(Op::kPush, client, g, 0, version)->refused, Refusal::kNone);
}

TEST(Rounds, MoveValuesByTheMeanAsMomentumDoes) {
  const codec::FloatEnvironment environment;
  for (const char* nesterov : {"yes", "no"}) {
    const ParameterTable table = table_of_rounds(str_cat("nesterov=", nesterov, ",grace=1000"));
    Direct job(table);
    const Arrays x = random_of(table, 1);
    job.send(Op::kSet, 1, x);
    for (const ClientId each : {1, 2}) job.shard.join(each);
    std::vector<float> w = range_of(job.shard.layout(), x), v(w.size());
    float* states[] = {v.data()};
    const UpdateRule like =
        make_rule(str_cat("momentum:rate=0.5,momentum=0.75,nesterov=", nesterov));
    for (unsigned round = 0; round < 3; ++round) {
      const Arrays a = random_of(table, 10 + round), b = random_of(table, 20 + round);
      push(job, 1, a, round);
      job.shard.end_round_if_over();
      EXPECT_EQ(job.shard.version(), round);
      EXPECT_TRUE(same_bits(job.shard.values(), w));
      push(job, 2, b, round);
      job.shard.end_round_if_over();
      EXPECT_EQ(job.shard.version(), round + 1);
      std::vector<float> mean = range_of(job.shard.layout(), a);
      const std::vector<float> other = range_of(job.shard.layout(), b);
      for (std::size_t i = 0; i < mean.size(); ++i) mean[i] = (mean[i] + other[i]) / 2;
      like.apply(w.data(), states, mean.data(), 0.5F, round + 1, w.size());
      EXPECT_TRUE(same_bits(job.shard.values(), w));
    }
    EXPECT_EQ(job.shard.statistics().pushes, 6U);
  }
}

TEST(Rounds, CountAPushThatComesLateInTheNextRound) {
  const codec::FloatEnvironment environment;
  const ParameterTable table = some_table(1, "rounds:rate=1,momentum=0,quorum=1,grace=0");
  Direct job(table);
  job.send(Op::kSet, 1, zeros_of(table));
  for (const ClientId each : {1, 2}) job.shard.join(each);
  Arrays ones = zeros_of(table), threes = ones;
  for (auto& each : ones) std::ranges::fill(each, 1.0F);
  for (auto& each : threes) std::ranges::fill(each, 3.0F);
  push(job, 1, ones);
  job.shard.end_round_if_over();
  EXPECT_EQ(job.shard.values()[0], -1.0F);
  push(job, 2, threes);
  push(job, 1, ones, 1);
  job.shard.end_round_if_over();
  EXPECT_EQ(job.shard.version(), 2U);
  EXPECT_EQ(job.shard.values()[0], -3.0F);
  EXPECT_EQ(job.shard.statistics().staleness[1], 1U);
}

TEST(Rounds, DropASumThatIsNotFinite) {
  const codec::FloatEnvironment environment;
  const ParameterTable table = some_table(1, "rounds:rate=1e30,momentum=0,grace=0");
  Direct job(table);
  const Arrays x = random_of(table, 1);
  job.send(Op::kSet, 1, x);
  Arrays large = random_of(table, 2);
  for (auto& each : large) std::ranges::fill(each, 1e30F);
  push(job, 1, large);
  job.shard.end_round_if_over();
  EXPECT_EQ(job.shard.version(), 1U);  // clients go on, with the values of before
  EXPECT_TRUE(same_bits(job.shard.values(), range_of(job.shard.layout(), x)));
  push(job, 1, zeros_of(table), 1);
  job.shard.end_round_if_over();
  EXPECT_TRUE(same_bits(job.shard.values(), range_of(job.shard.layout(), x)));
}

TEST(Rounds, LoseTheOpenOneWithARestart) {
  const codec::FloatEnvironment environment;
  const ParameterTable table = table_of_rounds("grace=0");
  Direct job(table);
  job.send(Op::kSet, 1, random_of(table, 1));
  push(job, 1, random_of(table, 2));
  job.shard.end_round_if_over();
  const std::vector<float> before = job.shard.values();
  push(job, 1, random_of(table, 3), 1);
  auto snapshot = std::make_shared<Snapshot>(job.shard.outline());
  for (auto& each : snapshot->arrays) each.values.resize(job.shard.layout().elements());
  job.shard.begin_snapshot(snapshot, [] {});
  job.shard.end_round_if_over();  // while it is copied
  while (job.shard.copy_block()) continue;
  Direct again{Shard(*snapshot)};
  EXPECT_EQ(again.shard.version(), 1U);
  EXPECT_TRUE(same_bits(again.shard.values(), before));
  again.shard.end_round_if_over();
  EXPECT_EQ(again.shard.version(), 1U);
}

// Rounds over transports, with a client that is there and never pushes.
class ServeRounds : public testing::TestWithParam<const char*> {};

TEST_P(ServeRounds, AStoppedClientDelaysARoundByTheGraceTimeAtMost) {
  Job job(2, GetParam(), /*threads=*/true);
  const ParameterTable table = some_table(2, "rounds:rate=1,momentum=0,quorum=2,grace=0.05");
  const auto a = job.connect(table, 0), b = job.connect(table, 1), stopped = job.connect(table, 2);
  for (const auto& each : {a.get(), b.get(), stopped.get()}) job.wait(each->join(soon()));
  job.wait(a->set(spans_of<Gradients>(zeros_of(table)), soon()));
  const Arrays g = random_of(table, 1);
  for (std::uint64_t round = 1; round <= 3; ++round) {
    for (const auto& each : {a.get(), b.get()})
      for (int i = 0; i < 2; ++i)  // they pull nothing, so their first pushes are late
        job.wait(each->push(spans_of<Gradients>(g), {.codec = "none"}, soon(), soon()));
    job.wait(a->ask(Op::kWait, round, soon()));
  }
  Arrays w = zeros_of(table);
  job.wait(b->pull(spans_of<Values>(w), "none", soon()));
  EXPECT_EQ(b->versions(), (std::vector<std::uint64_t>{3, 3}));
}

INSTANTIATE_TEST_SUITE_P(Transports, ServeRounds, testing::ValuesIn(kAllTransports));

}  // namespace serve_rounds_test
}  // namespace gradwire::serve
