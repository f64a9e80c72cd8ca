#include <cmath>
#include <limits>

#include "serve_requests.h"

namespace gradwire::serve {
namespace serve_shard_test {

TEST(Shard, TakesTheFirstWholeInitialValuesOnly) {
  const codec::FloatEnvironment environment;
  const ParameterTable table = some_table(2);
  Direct job(table, 1);
  const Arrays a = random_of(table, 1), b = random_of(table, 2);
  EXPECT_FALSE(job.send(Op::kSet, 1, a, 0, 0, /*frames=*/1).has_value());
  EXPECT_FALSE(job.shard.has_values());
  EXPECT_EQ(job.send(Op::kSet, 2, b)->refused, Refusal::kNone);
  EXPECT_EQ(job.shard.version(), 0U);
  EXPECT_EQ(job.send(Op::kSet, 1, a)->refused, Refusal::kHasValues);
  EXPECT_TRUE(same_bits(job.shard.values(), range_of(job.shard.layout(), b)));
}

TEST(Shard, RefusesAPushBeforeValues) {
  const codec::FloatEnvironment environment;
  Direct job(some_table());
  EXPECT_EQ(job.send(Op::kPush, 1, random_of(some_table(), 1))->refused, Refusal::kNoValues);
}

TEST(Shard, AppliesEachPushOnceByItsRule) {
  const codec::FloatEnvironment environment;
  for (const bool atomic : {false, true}) {
    ParameterTable table = some_table(1, "adagrad:rate=0.1");
    table.atomic_push = atomic;
    Direct job(table);
    const Arrays x = random_of(table, 1);
    job.send(Op::kSet, 1, x);
    std::vector<float> w = range_of(job.shard.layout(), x), s(w.size(), 1e-10F);
    float* states[] = {s.data()};
    for (unsigned i = 0; i < 3; ++i) {
      const Arrays g = random_of(table, 10 + i);
      const Answer answer = *job.send(Op::kPush, 1, g, 0, /*version=*/i / 2);
      EXPECT_EQ(answer.staleness, i - i / 2);
      make_rule(table.rule)
          .apply(w.data(), states, range_of(job.shard.layout(), g).data(), 0.1F, i + 1, w.size());
    }
    EXPECT_EQ(job.shard.version(), 3U);
    EXPECT_TRUE(same_bits(job.shard.values(), w));
  }
}

TEST(Shard, DividesTheRateByStaleness) {
  const codec::FloatEnvironment environment;
  ParameterTable table = some_table();
  table.divide = true;
  Direct job(table);
  std::vector<float> rates;
  job.shard.log_to([&](const AppliedFrame& frame) {
    if (frame.frame == 0) rates.push_back(frame.rate);
  });
  job.send(Op::kSet, 1, zeros_of(table));
  for (std::uint64_t version : {0, 0, 0, 0, 4}) job.send(Op::kPush, 1, zeros_of(table), 0, version);
  EXPECT_EQ(rates, (std::vector<float>{0.5F, 0.5F, 0.25F, 0.5F / 3, 0.5F}));
}

TEST(Shard, RefusesStalePushesAndChangesNothing) {
  const codec::FloatEnvironment environment;
  ParameterTable table = some_table();
  table.max_staleness = 1;
  Direct job(table);
  job.send(Op::kSet, 1, random_of(table, 1));
  for (int i = 0; i < 2; ++i)
    EXPECT_EQ(job.send(Op::kPush, 1, random_of(table, 2))->refused, Refusal::kNone);
  const std::vector<float> before = job.shard.values();
  const Answer answer = *job.send(Op::kPush, 1, random_of(table, 3));
  EXPECT_EQ(answer.refused, Refusal::kStale);
  EXPECT_NE(answer.why.find("max_staleness 1"), std::string::npos);
  EXPECT_TRUE(same_bits(job.shard.values(), before));
  EXPECT_EQ(job.shard.statistics().stale, 1U);
}

TEST(Shard, RefusesAnAtomicPushThatIsStaleAtItsEnd) {
  const codec::FloatEnvironment environment;
  ParameterTable table = some_table();
  table.max_staleness = 0;
  table.atomic_push = true;
  Direct job(table);
  const Arrays g = random_of(table, 2);
  job.send(Op::kSet, 1, random_of(table, 1));
  const auto end_late = [&] {
    const ShardFrame& last = job.shard.layout().frames().back();
    const std::vector<std::byte> zeros(last.count * sizeof(float));
    MessageHeader header;
    header.op = Op::kPush;
    header.flags = kLast;
    header.sequence = job.sequence() - 1;
    header.first = last.first;
    header.count = static_cast<std::uint32_t>(last.count);
    return *job.shard.push(1, {header, zeros});
  };
  job.send(Op::kPush, 1, g, 0, 0, job.shard.layout().frames().size() - 1);
  EXPECT_EQ(job.send(Op::kPush, 2, g)->refused, Refusal::kNone);
  const std::vector<float> before = job.shard.values();
  EXPECT_EQ(end_late().refused, Refusal::kStale);
  EXPECT_TRUE(same_bits(job.shard.values(), before));
}

TEST(Shard, CountsAPushOfAClientThatNeverPulledAsTheOldest) {
  const codec::FloatEnvironment environment;
  Direct job(some_table());
  job.send(Op::kSet, 1, random_of(some_table(), 1));
  for (std::uint32_t i = 0; i < 3; ++i)
    EXPECT_EQ(job.send(Op::kPush, 2, random_of(some_table(), 2), 0, kNoVersion)->staleness, i);
}

TEST(Shard, CountsAVersionThatARestartHasLostAsTheSnapshots) {
  const codec::FloatEnvironment environment;
  Direct job(some_table());
  job.send(Op::kSet, 1, random_of(some_table(), 1));
  for (int i = 0; i < 2; ++i) job.send(Op::kPush, 1, random_of(some_table(), 2));
  auto snapshot = std::make_shared<Snapshot>(job.shard.outline());
  for (auto& each : snapshot->arrays) each.values.resize(job.shard.layout().elements());
  job.shard.begin_snapshot(snapshot, [] {});
  while (job.shard.copy_block()) continue;
  Direct again(Shard(std::move(*snapshot)));
  for (const std::uint32_t staleness : {0, 1, 2})  // since version 2
    EXPECT_EQ(again.send(Op::kPush, 1, random_of(some_table(), 2), 0, 9)->staleness, staleness);
  EXPECT_EQ(again.send(Op::kPush, 1, random_of(some_table(), 2), 0, 4)->staleness, 1U);
}

TEST(Statistics, HaveAllDigitsOfTheMean) {
  Statistics statistics;
  for (const std::uint64_t versions : {0, 0, 1}) statistics.count_staleness(versions);
  const std::string text = statistics.json(3, {});
  EXPECT_NE(text.find("\"mean_staleness\": 0.3333333333333333,"), std::string::npos) << text;
}

// A table whose push is one frame, and another's of several.
ParameterTable table_of(bool small, std::string rule = "sgd:rate=0.5") {
  ParameterTable table = some_table(1, std::move(rule));
  if (small) table.parameters[0].shape = table.parameters[4].shape = {2};
  return table;
}

TEST(Shard, RefusesTheWholePushForNaNInItsLastFrame) {
  const codec::FloatEnvironment environment;
  for (const unsigned options : {0U, 1U, 2U, 3U}) {
    const bool small = (options & 1U) != 0;
    ParameterTable table = table_of(small);
    table.atomic_push = (options & 2U) != 0;
    Direct job(table);
    EXPECT_EQ(job.shard.layout().frames().size() == 1, small);
    const Arrays x = random_of(table, 1);
    job.send(Op::kSet, 1, x);
    Arrays g = random_of(table, 2);
    g[4].back() = std::numeric_limits<float>::quiet_NaN();
    EXPECT_EQ(job.send(Op::kPush, 1, g)->refused, Refusal::kNotFinite);
    EXPECT_EQ(job.shard.statistics().not_finite, 1U);
    EXPECT_EQ(job.shard.version(), 0U);
    EXPECT_TRUE(same_bits(job.shard.values(), range_of(job.shard.layout(), x)));
  }
}

TEST(Shard, RefusesAPushWhoseResultIsNotFinite) {
  const codec::FloatEnvironment environment;
  const float large = 0.9F * std::numeric_limits<float>::max();
  for (const char* rule : {"sgd:rate=100", "momentum:rate=0.1,momentum=1", "adagrad:rate=0.1"}) {
    for (const bool small : {false, true}) {
      const ParameterTable table = table_of(small, rule);
      Direct job(table);
      job.send(Op::kSet, 1, random_of(table, 1));
      Arrays g = random_of(table, 2);
      g[4].back() = large;
      job.send(Op::kPush, 1, g);  // makes the velocity large, or is refused already
      const std::vector<float> before = job.shard.values();
      const Answer answer = *job.send(Op::kPush, 1, g);
      EXPECT_EQ(answer.refused, Refusal::kNotFinite) << rule;
      EXPECT_NE(answer.why.find("too large"), std::string::npos) << answer.why;
      EXPECT_GT(job.shard.statistics().not_finite, 0U);
      EXPECT_TRUE(same_bits(job.shard.values(), before));
      EXPECT_EQ(job.send(Op::kPush, 1, zeros_of(table))->refused, Refusal::kNone);
      for (const float each : job.shard.values()) ASSERT_TRUE(std::isfinite(each));
    }
  }
}

TEST(Shard, RefusesRatesThatAreNegativeOrNotFinite) {
  const codec::FloatEnvironment environment;
  Direct job(some_table());
  job.send(Op::kSet, 1, random_of(some_table(), 1));
  const ShardFrame& frame = job.shard.layout().frames().front();
  const std::vector<std::byte> zeros(frame.count * sizeof(float));
  MessageHeader header;
  header.op = Op::kPush;
  header.flags = kFirst;
  header.count = static_cast<std::uint32_t>(frame.count);
  for (const float rate :
       {-0.1F, -std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    header.extra = std::bit_cast<std::uint32_t>(rate);
    EXPECT_THROW(job.shard.push(1, {header, zeros}), InvalidArgument) << rate;
  }
}

TEST(Shard, CountsWhatItStagesForEachClient) {
  const codec::FloatEnvironment environment;
  const ParameterTable table = some_table();
  Direct job(table, 0, 3 * bytes_of(table));  // the parameters, and two clients' pushes
  const Arrays g = zeros_of(table);
  job.send(Op::kSet, 1, g);
  for (const ClientId client : {1, 2}) job.send(Op::kPush, client, g, 0, 0, /*frames=*/1);
  const Answer answer = *job.send(Op::kPush, 3, g);
  EXPECT_EQ(answer.refused, Refusal::kInvalid);
  EXPECT_NE(answer.why.find("start more shards"), std::string::npos) << answer.why;
  job.shard.leave(2);
  EXPECT_EQ(job.send(Op::kPush, 3, g)->refused, Refusal::kNone);
}

TEST(Shard, GivesUpTheMemoryOfAPastPushWhereItIsShort) {
  const codec::FloatEnvironment environment;
  const ParameterTable table = some_table();
  Direct job(table, 0, 2 * bytes_of(table));  // the parameters, and a push or a client's copy
  job.send(Op::kSet, 1, random_of(table, 1));
  for (int i = 0; i < 2; ++i)
    EXPECT_EQ(job.send(Op::kPush, 1, zeros_of(table))->refused, Refusal::kNone);
  job.pull(1, table.index_of(codec::make_codec("int8")->name()));
  EXPECT_EQ(job.send(Op::kPush, 1, zeros_of(table))->refused, Refusal::kInvalid);
}

TEST(Shard, CountsWhatClientsHaveByPulls) {
  const codec::FloatEnvironment environment;
  const ParameterTable table = some_table();
  for (const std::string name : {"int8", "onebit"}) {
    Direct job(table, 0, 3 * bytes_of(table));
    const std::uint16_t codec = table.index_of(codec::make_codec(name)->name());
    job.send(Op::kSet, 1, random_of(table, 1));
    for (const ClientId client : {1, 2, 1, 2}) job.pull(client, codec);
    MessageHeader request;
    request.codec = codec;
    EXPECT_THROW(job.shard.begin_pull(3, request), NoRoom);
    job.pull(3, 0);  // of which it keeps nothing
    job.leave(3);
    job.leave(1);
    job.pull(3, codec);
  }
}

TEST(Shard, CountsTheCopiesThatPullsOfAtomicPushesRead) {
  const codec::FloatEnvironment environment;
  ParameterTable table = some_table();
  table.atomic_push = true;
  Direct job(table, 0, 2 * bytes_of(table));
  job.send(Op::kSet, 1, random_of(table, 1));
  {
    const Shard::Pull pull = job.shard.begin_pull(1, {}), same = job.shard.begin_pull(2, {});
    EXPECT_EQ(job.send(Op::kPush, 1, zeros_of(table))->refused, Refusal::kInvalid);
  }
  EXPECT_EQ(job.send(Op::kPush, 1, zeros_of(table))->refused, Refusal::kNone);
}

TEST(Shard, RefusesAPullForWhichThereIsNoMemoryAlone) {
  const codec::FloatEnvironment environment;
  ParameterTable table = table_of(/*small=*/true);
  table.atomic_push = true;
  Direct job(table, 0, 2 * bytes_of(table));
  job.send(Op::kSet, 1, random_of(table, 1));
  {
    const Shard::Pull before = job.shard.begin_pull(1, {});
    EXPECT_EQ(job.send(Op::kPush, 1, random_of(table, 2))->refused, Refusal::kNone);
    EXPECT_THROW(job.shard.begin_pull(2, {}), NoRoom);
  }
  EXPECT_TRUE(same_bits(job.pull(2, 0), job.shard.values()));
  EXPECT_EQ(job.shard.statistics().pulls, 3U);
}

TEST(Shard, KeepsShadowsEqualToWhatClientsHave) {
  const codec::FloatEnvironment environment;
  ParameterTable table = some_table();
  for (const bool atomic : {false, true}) {
    table.atomic_push = atomic;
    for (std::uint16_t codec = 0; codec < table.codecs.size(); ++codec) {
      Direct job(table);
      job.send(Op::kSet, 1, random_of(table, 1));
      std::mt19937 random(codec);
      for (int i = 0; i < 8; ++i) {
        if (random() % 2 == 0) job.send(Op::kPush, 1, random_of(table, 100 + i));
        const ClientId client = 1 + random() % 2;
        const auto& has = job.pull(client, codec);
        const auto& shadow = job.shard.shadow(client);
        ASSERT_TRUE(shadow.empty() || same_bits(shadow, has)) << table.codecs[codec];
      }
      // What a codec leaves over is in the next difference.
      const auto error = [&] {
        const auto& has = job.pull(1, codec);
        double sum = 0;
        for (std::size_t i = 0; i < has.size(); ++i)
          sum += std::fabs(double{has[i]} - double{job.shard.values()[i]});
        return sum;
      };
      const double before = error();
      for (int i = 0; i < 50; ++i) error();
      const auto& has = job.pull(1, codec);
      EXPECT_LT(error(), 0.9 * before + (codec < 3 ? 1e9 : 1)) << table.codecs[codec];
      const auto& shadow = job.shard.shadow(1);
      EXPECT_EQ(shadow.empty(), codec < 3);
      EXPECT_TRUE(shadow.empty() || same_bits(shadow, has)) << table.codecs[codec];
    }
  }
}

TEST(Shard, LosesNothingWhenClientsDieInTheMiddle) {
  const codec::FloatEnvironment environment;
  const ParameterTable table = some_table();
  for (std::uint16_t codec = 3; codec <= 6; ++codec) {
    Direct job(table);
    const ShardLayout& layout = job.shard.layout();
    std::vector<double> pushed(layout.elements()), applied(layout.elements());
    job.shard.log_to([&](const AppliedFrame& frame) {
      const std::size_t first = layout.frames()[frame.frame].first;
      for (std::size_t i = 0; i < frame.gradient.size(); ++i)
        applied[first + i] += double{frame.gradient[i]};
    });
    job.send(Op::kSet, 1, zeros_of(table));
    codec::ErrorFeedback feedback;
    std::mt19937 random(7 + codec);
    for (unsigned i = 0; i < 20; ++i) {
      const Arrays g = random_of(table, i);
      const auto range = range_of(layout, g);
      for (std::size_t k = 0; k < range.size(); ++k) pushed[k] += double{range[k]};
      const std::size_t frames = random() % (layout.frames().size() + 2);
      job.send(Op::kPush, 1, g, codec, job.shard.version(), frames, &feedback);
      if (frames < layout.frames().size()) job.shard.leave(1);
    }
    Arrays residual;
    for (const Parameter& each : table.parameters) residual.push_back(feedback.residual(each.name));
    const auto left = range_of(layout, residual);
    double worst = 0;
    for (std::size_t k = 0; k < pushed.size(); ++k)
      worst = std::max(worst, std::fabs(pushed[k] - applied[k] - double{left[k]}));
    EXPECT_LT(worst, 1e-4) << table.codecs[codec];
    EXPECT_GT(job.shard.statistics().partial, 0U);
  }
}

// Makes room for a shard's snapshot and begins it.
std::shared_ptr<Snapshot> begun_snapshot(Shard& shard, std::function<void()> done) {
  const auto snapshot = std::make_shared<Snapshot>(shard.outline());
  for (auto& each : snapshot->arrays) each.values.resize(shard.layout().elements());
  shard.begin_snapshot(snapshot, std::move(done));
  return snapshot;
}

Snapshot snapshot_of(Shard& shard) {
  const auto snapshot = begun_snapshot(shard, [] {});
  while (shard.copy_block()) continue;
  return *snapshot;
}

TEST(Shard, SnapshotsAreOfOneMomentThoughPushesComeBetweenTheirBlocks) {
  const codec::FloatEnvironment environment;
  for (const bool atomic : {false, true}) {
    ParameterTable table = some_table(1, "adam:rate=0.1");
    table.parameters.push_back({"large", {20 * kMostFrame}});
    table.atomic_push = atomic;
    Direct job(table);
    job.send(Op::kSet, 1, random_of(table, 1));
    job.send(Op::kPush, 1, random_of(table, 2));
    const Snapshot before = snapshot_of(job.shard);
    bool done = false;
    const auto snapshot = begun_snapshot(job.shard, [&done] { done = true; });
    const Arrays g = random_of(table, 3);
    while (job.shard.copy_block()) {
      // A push that is cut off, then a whole one.
      job.send(Op::kPush, 1, g, 0, 1, 20);
      job.send(Op::kPush, 2, g, 0, 1);
    }
    EXPECT_TRUE(done);
    EXPECT_EQ(snapshot->version, before.version);
    EXPECT_EQ(snapshot->steps, before.steps);
    for (std::size_t i = 0; i < before.arrays.size(); ++i)
      EXPECT_TRUE(same_bits(snapshot->arrays[i].values, before.arrays[i].values)) << i;
    EXPECT_GT(job.shard.version(), before.version);
  }
}

TEST(Shard, CopiesASnapshotInBlocks) {
  const codec::FloatEnvironment environment;
  ParameterTable table = some_table();
  table.parameters = {{"large", {100 * kMostFrame}}};
  Direct job(table);
  job.send(Op::kSet, 1, zeros_of(table));
  begun_snapshot(job.shard, [] {});
  int blocks = 0;
  while (job.shard.copy_block()) ++blocks;
  EXPECT_GE(blocks, 10);
}

TEST(Shard, GoesOnFromASnapshot) {
  const codec::FloatEnvironment environment;
  const ParameterTable table = some_table(2, "adam:rate=0.1");
  Direct job(table, 1);
  job.send(Op::kSet, 1, random_of(table, 1));
  job.send(Op::kPush, 1, random_of(table, 2));
  Shard other(snapshot_of(job.shard));
  EXPECT_EQ(other.version(), 1U);
  const Snapshot again = snapshot_of(other);
  for (std::size_t i = 0; i < again.arrays.size(); ++i)
    EXPECT_TRUE(same_bits(again.arrays[i].values, snapshot_of(job.shard).arrays[i].values));
  Snapshot broken = again;
  broken.arrays[1].values.pop_back();
  EXPECT_THROW(Shard{broken}, InvalidArgument);
  for (const bool more : {false, true}) {
    broken = again;
    more ? broken.arrays.push_back(broken.arrays[1]) : broken.arrays.pop_back();
    EXPECT_THROW(Shard{broken}, InvalidArgument);
  }
}

}  // namespace serve_shard_test
}  // namespace gradwire::serve
