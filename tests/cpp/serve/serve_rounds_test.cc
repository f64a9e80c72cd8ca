#include "gradwire/serve/shard/rounds.h"

#include "serve_requests.h"

namespace gradwire::serve {
namespace serve_rounds_test {

constexpr double kLong = 1000;  // seconds: longer than any test

constexpr ClientId replica(unsigned number, unsigned incarnation = 0) {
  return ClientId{number} << 16 | incarnation;
}
constexpr ClientId kA = replica(1), kB = replica(2), kC = replica(3);

TEST(Rounds, EndWhenAllHavePushed) {
  Rounds rounds({.quorum = 1, .grace = kLong});
  for (const ClientId each : {kA, kB, kC}) rounds.join(each);
  rounds.push(kA, 10, /*late=*/false);
  rounds.push(kB, 20, /*late=*/false);
  rounds.push(kB, 5, /*late=*/false);
  EXPECT_FALSE(rounds.over());
  rounds.push(kC, 30, /*late=*/false);
  EXPECT_TRUE(rounds.over());
  EXPECT_EQ(rounds.weight(), 65);
  rounds.next();
  EXPECT_FALSE(rounds.over());
  EXPECT_EQ(rounds.weight(), 0);
}

TEST(Rounds, EndWithoutTheLateAfterTheGraceTimeOfAQuorum) {
  Rounds rounds({.quorum = 2, .grace = 0});
  for (const ClientId each : {kA, kB, kC}) rounds.join(each);
  EXPECT_TRUE(rounds.due().is_never());
  rounds.push(kA, 1, /*late=*/false);
  EXPECT_FALSE(rounds.over());
  EXPECT_FALSE(rounds.has_quorum());
  rounds.push(kB, 1, /*late=*/false);
  EXPECT_TRUE(rounds.over());
  EXPECT_TRUE(rounds.has_quorum());
  rounds.next();
  EXPECT_TRUE(rounds.due().is_never());
}

TEST(Rounds, EndWithoutAQuorumWhenPatienceEnds) {
  Rounds rounds({.quorum = 3, .grace = 0, .patience = 0});
  for (const ClientId each : {kA, kB, kC}) rounds.join(each);
  rounds.push(kA, 1, /*late=*/true);
  EXPECT_FALSE(rounds.over());
  rounds.push(kA, 1, /*late=*/false);
  EXPECT_TRUE(rounds.over());
  EXPECT_FALSE(rounds.has_quorum());

  Rounds patient({.quorum = 3, .grace = kLong, .patience = kLong});
  for (const ClientId each : {kA, kB, kC}) patient.join(each);
  patient.push(kA, 1, /*late=*/false);
  EXPECT_FALSE(patient.over());
  patient.next();  // as if the time were over
  patient.push(kA, 1, /*late=*/false);
  EXPECT_TRUE(patient.over());  // the others count no more
  EXPECT_TRUE(patient.has_quorum());
}

TEST(Rounds, CountAReplicaThatComesBackOnce) {
  Rounds rounds({.quorum = 2, .grace = 0, .patience = kLong});
  for (const ClientId each : {kA, kB, kC}) rounds.join(each);
  rounds.push(kA, 1, /*late=*/false);
  rounds.join(replica(1, 1));
  rounds.leave(kA);
  rounds.push(replica(1, 1), 1, /*late=*/false);
  EXPECT_FALSE(rounds.over());
  EXPECT_FALSE(rounds.has_quorum());
  EXPECT_EQ(rounds.weight(), 2);
  rounds.push(kB, 1, /*late=*/false);
  EXPECT_TRUE(rounds.over());
}

TEST(Rounds, WaitForALateClientOnceOnly) {
  Rounds rounds({.quorum = 2, .grace = 0});
  for (const ClientId each : {kA, kB, kC}) rounds.join(each);
  rounds.push(kA, 1, /*late=*/false);
  rounds.push(kB, 1, /*late=*/false);
  EXPECT_TRUE(rounds.over());
  rounds.next();

  Rounds patient({.quorum = 1, .grace = kLong});
  for (const ClientId each : {kA, kB}) patient.join(each);
  patient.push(kA, 1, /*late=*/false);
  EXPECT_FALSE(patient.over());
  patient.next();  // as if the grace time were over
  patient.push(kA, 1, /*late=*/false);
  EXPECT_TRUE(patient.over());  // without B
  patient.next();
  patient.push(kB, 1, /*late=*/false);  // which is back, late
  patient.push(kA, 1, /*late=*/false);
  EXPECT_TRUE(patient.over());
  patient.next();
  patient.push(kA, 1, /*late=*/false);
  EXPECT_FALSE(patient.over());  // and is waited for again
}

TEST(Rounds, WaitForAJoinerFromItsSecondRoundOn) {
  Rounds rounds({.quorum = 1, .grace = kLong});
  rounds.join(kA);
  rounds.push(kA, 1, /*late=*/false);
  rounds.next();
  rounds.join(kB);
  rounds.push(kA, 1, /*late=*/false);
  EXPECT_TRUE(rounds.over());
  rounds.next();
  rounds.push(kA, 1, /*late=*/false);
  EXPECT_FALSE(rounds.over());
}

TEST(Rounds, GoOnWithoutWhoHasLeft) {
  Rounds rounds({.quorum = 3, .grace = kLong});
  for (const ClientId each : {kA, kB, kC}) rounds.join(each);
  rounds.push(kA, 4, /*late=*/false);
  rounds.push(kB, 4, /*late=*/false);
  rounds.leave(kB);
  EXPECT_FALSE(rounds.over());
  rounds.leave(kC);
  EXPECT_TRUE(rounds.over());
  EXPECT_EQ(rounds.weight(), 8);  // what B had pushed counts
}

TEST(Rounds, GoOnAsIfALatePushHadNotCome) {
  Rounds rounds({.quorum = 1, .grace = 0});
  for (const ClientId each : {kA, kB}) rounds.join(each);
  rounds.push(kA, 1, /*late=*/true);
  EXPECT_FALSE(rounds.over());
  EXPECT_TRUE(rounds.due().is_never());
  rounds.push(kA, 2, /*late=*/true);  // its second
  EXPECT_TRUE(rounds.over());
  EXPECT_EQ(rounds.weight(), 3);
  rounds.next();

  Rounds patient({.quorum = 1, .grace = kLong});
  for (const ClientId each : {kA, kB}) patient.join(each);
  patient.push(kA, 1, /*late=*/true);
  patient.push(kB, 1, /*late=*/false);
  EXPECT_FALSE(patient.over());  // A is back, and is expected to push in time
  patient.push(kA, 1, /*late=*/true);
  EXPECT_TRUE(patient.over());
}

ParameterTable table_of_rounds(const std::string& options) {
  return some_table(1, "rounds:rate=0.5,momentum=0.75," + options);
}

// A push of the weight job.rate; 0 is the rule's own, which is 1.
void push(Direct& job, ClientId client, const Arrays& g, std::uint64_t version = 0) {
  EXPECT_EQ(job.send(Op::kPush, client, g, 0, version)->refused, Refusal::kNone);
}

TEST(Rounds, MoveValuesByTheMeanAsMomentumDoes) {
  const codec::FloatEnvironment environment;
  for (const char* nesterov : {"yes", "no"}) {
    const ParameterTable table = table_of_rounds(str_cat("nesterov=", nesterov, ",grace=1000"));
    Direct job(table);
    const Arrays x = random_of(table, 1);
    job.send(Op::kSet, kA, x);
    for (const ClientId each : {kA, kB}) job.shard.join(each);
    std::vector<float> w = range_of(job.shard.layout(), x), v(w.size());
    float* states[] = {v.data()};
    const UpdateRule like =
        make_rule(str_cat("momentum:rate=0.5,momentum=0.75,nesterov=", nesterov));
    for (unsigned round = 0; round < 3; ++round) {
      const Arrays a = random_of(table, 10 + round), b = random_of(table, 20 + round);
      push(job, kA, a, round);
      job.shard.end_round_if_over();
      EXPECT_EQ(job.shard.version(), round);
      EXPECT_TRUE(same_bits(job.shard.values(), w));
      push(job, kB, b, round);
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
  job.send(Op::kSet, kA, zeros_of(table));
  for (const ClientId each : {kA, kB}) job.shard.join(each);
  Arrays ones = zeros_of(table), threes = ones;
  for (auto& each : ones) std::ranges::fill(each, 1.0F);
  for (auto& each : threes) std::ranges::fill(each, 3.0F);
  push(job, kA, ones);
  job.shard.end_round_if_over();
  EXPECT_EQ(job.shard.values()[0], -1.0F);
  push(job, kB, threes);
  push(job, kA, ones, 1);
  job.shard.end_round_if_over();
  EXPECT_EQ(job.shard.version(), 2U);
  EXPECT_EQ(job.shard.values()[0], -3.0F);
  EXPECT_EQ(job.shard.statistics().staleness[1], 1U);
}

TEST(Rounds, RefuseWeightsThatAreNoneOrAddUpToInfinity) {
  const ParameterTable table = table_of_rounds("grace=0");
  Direct job(table);
  job.shard.join(kA);
  job.send(Op::kSet, kA, zeros_of(table));
  for (const float weight : {-0.0F, 1e-31F, 1e31F, std::numeric_limits<float>::max()}) {
    job.rate = weight;
    EXPECT_EQ(job.send(Op::kPush, kA, random_of(table, 1))->refused, Refusal::kInvalid);
    job.shard.end_round_if_over();
    EXPECT_EQ(job.shard.version(), 0U);
  }
  for (const float weight : {1e-30F, 1e30F}) {
    job.rate = weight;
    push(job, kA, zeros_of(table), job.shard.version());
    job.shard.end_round_if_over();
  }
  EXPECT_EQ(job.shard.version(), 2U);
}

TEST(Rounds, DropASumThatIsNotFinite) {
  const codec::FloatEnvironment environment;
  const ParameterTable table = some_table(1, "rounds:rate=1e30,momentum=0,grace=0");
  Direct job(table);
  const Arrays x = random_of(table, 1);
  job.send(Op::kSet, kA, x);
  Arrays large = random_of(table, 2);
  for (auto& each : large) std::ranges::fill(each, 1e30F);
  push(job, kA, large);
  job.shard.end_round_if_over();
  EXPECT_EQ(job.shard.version(), 1U);  // clients go on, with the values of before
  EXPECT_TRUE(same_bits(job.shard.values(), range_of(job.shard.layout(), x)));
  push(job, kA, zeros_of(table), 1);
  job.shard.end_round_if_over();
  EXPECT_TRUE(same_bits(job.shard.values(), range_of(job.shard.layout(), x)));
}

TEST(Rounds, LoseTheOpenOneWithARestart) {
  const codec::FloatEnvironment environment;
  const ParameterTable table = table_of_rounds("grace=0");
  Direct job(table);
  job.send(Op::kSet, kA, random_of(table, 1));
  push(job, kA, random_of(table, 2));
  job.shard.end_round_if_over();
  const std::vector<float> before = job.shard.values();
  push(job, kA, random_of(table, 3), 1);
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
