// Vectors, staged pushes, and what a coordinator may do.
#include "gradwire/serve/vectors/vectors.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <numeric>

#include "gradwire/serve/vectors/block_sums.h"
#include "serve_job.h"

namespace gradwire::serve {
namespace serve_vectors_test {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

ParameterTable staged_table(std::uint32_t shards, DType dtype = DType::kFloat32) {
  ParameterTable table = some_table(shards, "staged");
  table.dtype = dtype;
  if (dtype == DType::kFloat64) table.codecs = {"none"};
  return table;
}

// Float64 vectors of a whole service, which each shard keeps its part of.
using Whole = std::vector<double>;

Whole random_whole(std::size_t elements, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  Whole made(elements);
  // Of magnitudes that lose digits when they are added in another order.
  for (double& x : made) x = std::ldexp(normal(random), static_cast<int>(random() % 30));
  return made;
}

Words words_of(const Whole& whole, std::size_t words, std::size_t first, std::size_t count) {
  Words made(count * words);
  narrow(whole.data() + first, words, count, made.data());
  return made;
}

Whole whole_of(const Words& values, std::size_t words) {
  Whole made(values.size() / words);
  widen(values.data(), words, made.size(), made.data());
  return made;
}

// All shards of one vector each, by their layouts.
std::vector<Vectors> cut(const ParameterTable& table, const std::map<std::string, Whole>& whole) {
  std::vector<Vectors> shards;
  std::size_t first = 0;
  for (std::uint32_t i = 0; i < table.shards; ++i) {
    const std::size_t count = ShardLayout(table, codecs_of(table), i).elements();
    Vectors& shard = shards.emplace_back(count, table.words(), block_of(table.elements()));
    for (const auto& [name, values] : whole)
      shard.put(name, words_of(values, table.words(), first, count));
    first += count;
  }
  EXPECT_EQ(first, table.elements());
  return shards;
}

double total(const std::vector<double>& parts) {
  ExactSum sum;
  for (const double each : parts) sum.add(each);
  const auto rounded = sum.parts();  // the largest comes last
  return std::accumulate(rounded.begin(), rounded.end(), 0.0);
}

using Name = std::vector<std::pair<std::string, std::string>>;

TEST(BlockSums, HaveTheSameBitsForAnyNumberOfShards) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
    const ParameterTable one = staged_table(1, dtype);
    const std::map<std::string, Whole> whole = {{"w", random_whole(one.elements(), 1)},
                                                {"g", random_whole(one.elements(), 2)}};
    const std::vector<Command> commands = {command::Dots{Name{{"w", "g"}, {"g", "g"}}},
                                           command::Abssum{"g"}};
    std::vector<double> expected;
    for (const std::uint32_t shards : {1, 2, 3, 7, 16}) {
      std::vector<std::vector<double>> parts(3);
      for (Vectors& each : cut(staged_table(shards, dtype), whole)) {
        const auto results = each.run(commands);
        const std::vector<std::vector<double>> found = {
            results[0].numbers[0], results[0].numbers[1], results[1].numbers[0]};
        for (std::size_t i = 0; i < found.size(); ++i)
          parts[i].insert(parts[i].end(), found[i].begin(), found[i].end());
      }
      std::vector<double> sums;
      for (const auto& each : parts) sums.push_back(total(each));
      if (expected.empty()) expected = sums;
      EXPECT_EQ(sums, expected) << shards << " shards";
    }
    long double near = 0, size = 0;
    const auto rounded = [&](double x) {
      return dtype == DType::kFloat32 ? static_cast<double>(static_cast<float>(x)) : x;
    };
    for (std::size_t i = 0; i < one.elements(); ++i) {
      const auto product =
          static_cast<long double>(rounded(whole.at("w")[i])) * rounded(whole.at("g")[i]);
      near += product;
      size += std::abs(product);
    }
    EXPECT_NEAR(expected[0], static_cast<double>(near), 1e-14 * static_cast<double>(size));
  }
}

TEST(BlockSums, AreExactSumsOfBlocks) {
  ExactSum sum;
  for (const double x : {1e300, 1.0, -1e300, 1e-300, 3.0, -1e-300}) sum.add(x);
  EXPECT_EQ(total(sum.parts()), 4.0);
  sum.add(kInfinity);
  EXPECT_EQ(sum.parts(), std::vector{kInfinity});
  sum.add(-kInfinity);
  EXPECT_TRUE(std::isnan(sum.parts().at(0)));
  ExactSum large;
  for (int i = 0; i < 3; ++i) large.add(std::numeric_limits<double>::max());
  EXPECT_EQ(large.parts(), std::vector{kInfinity});
}

TEST(BlockSums, CutVectorsOfAnySizeIntoBlocks) {
  EXPECT_EQ(block_of(1), 1U);
  EXPECT_EQ(block_of(2047), 1U);
  EXPECT_EQ(block_of(25'450), 16U);
  EXPECT_EQ(block_of(25'000'000), kMostBlock);
  ParameterTable table = staged_table(1);
  table.parameters = {{"a", {70'000}}};
  table.shards = 1094;  // blocks of 64
  EXPECT_EQ(ShardLayout(table, codecs_of(table), 1093).elements(), 48U);
  table.shards = 1095;
  EXPECT_THROW(table.check(), InvalidArgument);
}

class VectorsTest : public testing::TestWithParam<std::size_t> {
 protected:
  static constexpr std::size_t kElements = 5000;
  std::size_t words() const { return GetParam(); }
  Words make(unsigned seed) const {
    return words_of(random_whole(kElements, seed), words(), 0, kElements);
  }
  Whole get(const std::string& name) const { return whole_of(*vectors.find(name), words()); }
  std::vector<CommandResult> run(std::vector<Command> commands) { return vectors.run(commands); }
  void expect_refusal(const Command& command, const std::string& text) {
    try {
      run({command::CopyVector{"trace", "w"}, command});
      ADD_FAILURE() << "nothing was refused for: " << text;
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
    EXPECT_EQ(vectors.find("trace"), nullptr) << "a part was done: " << text;
  }
  void put_w() { vectors.put("w", make(1)); }

  Vectors vectors{kElements, words(), block_of(kElements), {.vectors = 8, .pushes = 8}};
};

TEST_P(VectorsTest, CombineAsASumInFloat64) {
  put_w();
  vectors.put("d", make(2));
  const Whole w = get("w"), d = get("d");
  run({command::WeightedSum{"w", {{1.0, "w"}, {0.3, "d"}, {-0.7, "w"}}},
       command::WeightedSum{"e", {{-1.0, "d"}}}});
  const Whole combined = get("w");
  for (std::size_t i = 0; i < kElements; ++i) {
    const volatile double a = 0.3 * d[i], b = -0.7 * w[i];  // no fused operations
    const double sum = (w[i] + a) + b;
    ASSERT_EQ(combined[i], words() == 1 ? static_cast<double>(static_cast<float>(sum)) : sum);
    ASSERT_EQ(get("e")[i], -d[i]);
    if (i == 64) break;
  }
}

TEST_P(VectorsTest, LeaveWhatOthersRead) {
  put_w();
  const SharedWords read = vectors.find("w");
  const Words before = *read;
  for (int i = 0; i < 4; ++i) run({command::WeightedSum{"w", {{2.0, "w"}}}});
  EXPECT_TRUE(same_bits(*read, before));
}

TEST_P(VectorsTest, KeepCopiesApart) {
  put_w();
  run({command::CopyVector{"old", "w"}, command::WeightedSum{"w", {{3.0, "w"}}}});
  EXPECT_EQ(get("old"), whole_of(make(1), words()));
  EXPECT_NE(get("w"), get("old"));
  const auto names = run({command::ListNames{}, command::Drop{"old"}, command::ListNames{}});
  EXPECT_EQ(names[0].names, (std::vector<std::string>{"old", "w"}));
  EXPECT_EQ(names[2].names, (std::vector<std::string>{"w"}));
}

TEST_P(VectorsTest, ShowNotFiniteValuesInSums) {
  Whole values(kElements, 1.0);
  values[4321] = -7;
  vectors.put("w", words_of(values, words(), 0, kElements));
  EXPECT_EQ(run({command::Absmax{"w"}})[0].numbers, (std::vector<std::vector<double>>{{7}}));
  for (const double odd : {kNan, kInfinity}) {
    values[77] = odd;
    vectors.put("x", words_of(values, words(), 0, kElements));
    const auto found = run(
        {command::Dots{Name{{"x", "w"}, {"w", "w"}}}, command::Absmax{"x"}, command::Abssum{"x"}});
    for (const double each :
         {found[0].numbers[0][0], found[1].numbers[0][0], found[2].numbers[0][0]})
      EXPECT_EQ(std::isnan(odd) ? std::isnan(each) : each == odd, true);
    EXPECT_EQ(found[0].numbers[1], std::vector<double>{kElements - 1 + 49});
  }
}

TEST_P(VectorsTest, FoldStagedPushesOnce) {
  put_w();
  for (unsigned replica = 0; replica < 3; ++replica)
    vectors.stage({7, {replica, 0}}, make(10 + replica));
  vectors.stage({7, {1, 0}}, make(99));  // again: the first one counts
  vectors.stage({8, {0, 0}}, make(50));
  EXPECT_EQ(vectors.staged(), 4U);
  run({command::FoldPushes{"g", 7, {{2, 0}, {0, 0}, {1, 0}}}});
  const Whole parts[] = {whole_of(make(12), words()), whole_of(make(10), words()),
                         whole_of(make(11), words())};
  const Whole folded = get("g");
  for (std::size_t i = 0; i < kElements; ++i) {
    const double sum = (parts[0][i] + parts[1][i]) + parts[2][i];
    ASSERT_EQ(folded[i], words() == 1 ? static_cast<double>(static_cast<float>(sum)) : sum);
  }
  vectors.stage({7, {0, 1}}, make(51));  // too late
  EXPECT_EQ(vectors.staged(), 1U);
  expect_refusal(command::FoldPushes{"g", 7, {{0, 1}}}, "batch 7 is over");
  run({command::Discard{false, 8}});
  vectors.stage({8, {5, 5}}, make(52));
  EXPECT_EQ(vectors.staged(), 0U);
  vectors.stage({9, {0, 0}}, make(53));
  run({command::Discard{true, 0}});
  vectors.stage({9, {0, 1}}, make(53));
  EXPECT_EQ(vectors.staged(), 0U);
}

TEST_P(VectorsTest, RefuseAndChangeNothing) {
  expect_refusal(command::ListNames{}, "no initial values");
  put_w();
  vectors.stage({7, {3, 4}}, make(2));
  const Words before = *vectors.find("w");
  expect_refusal(command::FoldPushes{"w", 7, {{3, 4}, {3, 5}}}, "push 5 of replica 3 to batch 7");
  expect_refusal(command::FoldPushes{"w", 7, {}}, "no pushes");
  expect_refusal(command::Dots{Name{{"w", "y"}}}, "no vector 'y'");
  expect_refusal(command::WeightedSum{"d", {{1.0, "gone"}}}, "no vector 'gone'");
  expect_refusal(command::WeightedSum{"d", {}}, "no terms");
  expect_refusal(command::CopyVector{"", "w"}, "printable ASCII");
  expect_refusal(command::CopyVector{"line\nbreak", "w"}, "printable ASCII");
  expect_refusal(command::CopyVector{std::string(65, 'a'), "w"}, "printable ASCII");
  expect_refusal(command::Drop{"w"}, "stay");
  expect_refusal(command::Drop{"y"}, "no vector 'y'");
  EXPECT_TRUE(same_bits(*vectors.find("w"), before));
  EXPECT_EQ(run({command::FoldPushes{"d", 7, {{3, 4}}}}).size(), 1U);
}

TEST_P(VectorsTest, HaveLimits) {
  put_w();
  for (const char* name : {"a", "b", "c", "d", "e", "f"}) run({command::CopyVector{name, "w"}});
  expect_refusal(command::CopyVector{"x", "w"}, "at most 8 vectors");
  for (std::uint64_t i = 0; i < 8; ++i) vectors.stage({1, {i, 0}}, make(1));
  EXPECT_THROW(vectors.stage({1, {8, 0}}, make(1)), InvalidArgument);
  const std::uint64_t two = 2 * kElements * words() * sizeof(float);
  Vectors small(kElements, words(), 4, {.bytes = two});
  small.put("w", make(1));
  small.stage({1, {0, 0}}, make(2));
  EXPECT_THROW(small.stage({1, {1, 0}}, make(2)), InvalidArgument);
  EXPECT_THROW(small.put("x", make(2)), InvalidArgument);
}

TEST_P(VectorsTest, CountPushesThatArrive) {
  const std::uint64_t three = 3 * kElements * words() * sizeof(float);
  Vectors small(kElements, words(), 4, {.bytes = three});
  small.put("w", make(1));
  auto first = small.arrive({1, {0, 0}});
  EXPECT_TRUE(first.has_value());
  {
    const auto second = small.arrive({1, {1, 0}});
    EXPECT_THROW(small.arrive({1, {2, 0}}), InvalidArgument);
    EXPECT_THROW(small.put("x", make(2)), InvalidArgument);
  }
  small.put("x", make(2));  // the second one has not come
  EXPECT_THROW(small.stage({1, {3, 0}}, make(2)), InvalidArgument);
  first.reset();
  small.stage({1, {0, 0}}, make(3));
  EXPECT_FALSE(small.arrive({1, {0, 0}}).has_value());  // again: it needs no room
}

INSTANTIATE_TEST_SUITE_P(Words, VectorsTest, testing::Values(1, 2));

TEST(FinishedBatches, KnowTheLast) {
  FinishedBatches finished;
  EXPECT_EQ(finished.last(), 0U);
  for (const std::uint64_t batch : {7, 90, 8}) finished.add(batch);
  EXPECT_EQ(finished.last(), 90U);
}

TEST(FinishedBatches, AreRememberedInLittleMemory) {
  FinishedBatches finished;
  for (std::uint64_t batch = 10; batch < 10 + 2 * FinishedBatches::kRemembered; ++batch)
    finished.add(2 * batch);
  EXPECT_TRUE(finished.has(0));
  EXPECT_TRUE(finished.has(21));
  EXPECT_TRUE(finished.has(4 * FinishedBatches::kRemembered));
  EXPECT_FALSE(finished.has(4 * FinishedBatches::kRemembered + 1));
}

std::vector<Command> all_commands() {
  return {command::Dots{Name{{"a", "b"}, {"b", "b"}}},
          command::Absmax{"a"},
          command::Abssum{"b"},
          command::WeightedSum{"c", {{-0.5, "a"}, {kInfinity, "b"}}},
          command::CopyVector{"d", "c"},
          command::Drop{"d"},
          command::ListNames{},
          command::FoldPushes{"g", ~std::uint64_t{0}, {{1, 2}, {3, 4}}},
          command::Discard{true, 0},
          command::Discard{false, 9}};
}

TEST(Commands, PassWhatASenderWrites) {
  const auto bytes = pack(all_commands());
  const std::vector<Command> parsed = parse_commands(bytes);
  EXPECT_EQ(pack(parsed), bytes);
  EXPECT_EQ(std::get<command::FoldPushes>(parsed[7]).pushes.at(1), (PushName{3, 4}));
  const std::vector<CommandResult> results = {{.numbers = {{1, 2}, {}}}, {.names = {"a"}}, {}};
  EXPECT_EQ(parse_results(pack(results)), results);
}

TEST(Commands, RefuseForeignBytes) {
  const auto bytes = pack(all_commands());
  for (std::size_t size = 0; size < bytes.size(); ++size)
    EXPECT_THROW(parse_commands(ConstBytes(bytes).first(size)), InvalidArgument);
  auto longer = bytes;
  longer.push_back({});
  EXPECT_THROW(parse_commands(longer), InvalidArgument);
  auto unknown = pack(std::vector<Command>{command::ListNames{}});
  unknown.back() = std::byte{9};
  EXPECT_THROW(parse_commands(unknown), InvalidArgument);
  EXPECT_THROW(parse_commands(pack(std::vector<Command>(kMostCommands + 1, command::ListNames{}))),
               InvalidArgument);
  EXPECT_THROW(parse_commands(pack(std::vector<Command>{
                   command::FoldPushes{"g", 1, std::vector<PushName>(kMostItems + 1)}})),
               InvalidArgument);
}

// A service with a replica and a coordinator.
class Coordinated : public testing::TestWithParam<DType> {
 protected:
  using Spans = std::vector<std::span<float>>;

  void SetUp() override {
    job.wait(replica->join(soon()));
    job.wait(coordinator->join(soon(), ClientRole::kCoordinator));
    job.wait(replica->set(inputs(start), soon()));
  }
  // Arrays of words, with sensible numbers in them.
  Arrays random(unsigned seed) const {
    Arrays made = random_of(table, seed);
    if (table.words() == 1) return made;
    for (auto& each : made) {
      const Whole wide(each.begin(), each.end());
      each = words_of(wide, 2, 0, wide.size());
    }
    return made;
  }
  static Gradients inputs(const Arrays& arrays) { return spans_of<Gradients>(arrays); }
  Arrays pull() {
    Arrays values = random(9);
    job.wait(replica->pull(spans_of<Values>(values), "none", soon()));
    return values;
  }
  void push(const Arrays& gradient, std::uint64_t batch, PushName name) {
    PushOptions options;
    options.staged = {batch, name};
    job.wait(replica->push(inputs(gradient), options, Deadline::never(), soon()));
  }
  std::shared_ptr<ClientCall> ask(Client& client, const std::vector<Command>& commands) {
    auto call = client.ask(commands, soon());
    job.wait(call);
    return call;
  }
  std::string refusal(const std::function<std::shared_ptr<ClientCall>()>& request) {
    try {
      job.wait(request());
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "";
  }

  const ParameterTable table = staged_table(3, GetParam());
  Job job{3, "inproc", /*threads=*/true};
  std::unique_ptr<Client> replica = job.connect(table, 0), coordinator = job.connect(table, 1);
  const Arrays start = random(1);
};

TEST_P(Coordinated, GradientsGoFromReplicasToTheParameters) {
  EXPECT_EQ(pull(), start);
  const Arrays gradient = random(2);
  push(gradient, 1, {0, 0});
  push(random(3), 1, {0, 0});  // the same name again
  EXPECT_EQ(pull(), start);
  ask(*coordinator,
      {command::FoldPushes{"g", 1, {{0, 0}}}, command::WeightedSum{"w", {{1.0, "g"}}}});
  EXPECT_EQ(pull(), gradient);
  EXPECT_EQ(replica->versions(), std::vector<std::uint64_t>(3, 1));
  const auto results = ask(*replica, {command::ListNames{}})->results();
  EXPECT_EQ(results.at(2).at(0).names, (std::vector<std::string>{"g", "w"}));
}

TEST_P(Coordinated, CoordinatorsSeeNoValues) {
  Arrays values = start;
  const auto no_access = [&](const std::function<std::shared_ptr<ClientCall>()>& request) {
    EXPECT_NE(refusal(request).find("a coordinator has no access"), std::string::npos);
  };
  no_access([&] { return coordinator->pull(spans_of<Values>(values), "none", soon()); });
  no_access([&] { return coordinator->set(inputs(start), soon()); });
  no_access([&] {
    PushOptions options;
    options.staged = {1, {0, 0}};
    return coordinator->push(inputs(start), options, Deadline::never(), soon());
  });
  ask(*coordinator, {command::ListNames{}});  // its channels go on
}

TEST_P(Coordinated, ReplicasChangeNoVectors) {
  for (const Command& each : all_commands()) {
    if (!changes_vectors(each)) continue;
    const std::string text = refusal([&] { return replica->ask(std::vector{each}, soon()); });
    EXPECT_NE(text.find("only a coordinator"), std::string::npos) << text;
  }
  ask(*replica, {command::Dots{Name{{"w", "w"}}}, command::Absmax{"w"}, command::Abssum{"w"}});
}

TEST_P(Coordinated, AnotherCoordinatorTakesThePlace) {
  const auto second = job.connect(table, 2);
  job.wait(second->join(soon(), ClientRole::kCoordinator));
  ask(*second, {command::CopyVector{"kept", "w"}});
  EXPECT_THROW(ask(*coordinator, {command::Drop{"kept"}}), TransportError);
  EXPECT_EQ(ask(*second, {command::ListNames{}})->results().at(0).at(0).names.size(), 2U);
}

TEST_P(Coordinated, SnapshotsHoldVectorsAndNoPushes) {
  push(random(2), 1, {0, 0});
  ask(*coordinator, {command::WeightedSum{"d", {{2.0, "w"}}}, command::CopyVector{"w", "d"}});
  const Snapshot snapshot = job.servers[1]->snapshot(soon());
  EXPECT_EQ(snapshot.version, 1U);
  ASSERT_EQ(snapshot.arrays.size(), 2U);
  Shard restored(snapshot);
  EXPECT_TRUE(same_bits(restored.values(), snapshot.arrays[0].values));
  const std::vector<Command> fold = {command::FoldPushes{"g", 1, {{0, 0}}}};
  EXPECT_THROW(restored.ask(pack(fold), true), InvalidArgument);
  Snapshot damaged = snapshot;
  damaged.arrays[1].name = "v";
  EXPECT_THROW(Shard{damaged}, InvalidArgument);
  damaged = snapshot;
  damaged.arrays[0].values.pop_back();
  EXPECT_THROW(Shard{damaged}, InvalidArgument);
}

TEST_P(Coordinated, RequestsThatDoNotFitTheRuleAreRefused) {
  EXPECT_THROW(replica->push(inputs(start), {}, Deadline::never(), soon()), InvalidArgument);
  EXPECT_THROW(coordinator->ask(std::vector<Command>{}, soon()), InvalidArgument);
  ParameterTable other = staged_table(1);
  other.divide = true;
  EXPECT_THROW(other.check(), InvalidArgument);
  ParameterTable wide = some_table(1);
  wide.dtype = DType::kFloat64;
  EXPECT_THROW(wide.check(), InvalidArgument);
  Shard plain(some_table(1), 0);
  EXPECT_THROW(plain.ask(pack(all_commands()), true), InvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(DTypes, Coordinated, testing::Values(DType::kFloat32, DType::kFloat64));

TEST(StagedPush, ComesWithAnyCodecAndCountsOnlyWhenWhole) {
  const ParameterTable table = staged_table(1);
  const Arrays gradient = random_of(table, 3);
  for (const std::string& codec : table.codecs) {
    Job job(1, "inproc", /*threads=*/true);
    const auto client = job.connect(table, 0), coordinator = job.connect(table, 1);
    job.wait(client->join(soon()));
    job.wait(coordinator->join(soon(), ClientRole::kCoordinator));
    job.wait(client->set(spans_of<Gradients>(gradient), soon()));
    PushOptions options{.codec = codec};
    options.staged = {4, {1, 2}};
    job.wait(client->push(spans_of<Gradients>(gradient), options, Deadline::never(), soon()));
    const auto call = coordinator->ask(std::vector<Command>{command::FoldPushes{"g", 4, {{1, 2}}},
                                                            command::Dots{Name{{"g", "w"}}}},
                                       soon());
    job.wait(call);
    EXPECT_GT(total(call->results().at(0).at(1).numbers.at(0)), 0) << codec;
  }
  // A push whose last frame does not come leaves nothing.
  Shard shard(table, 0);
  const ShardLayout& layout = shard.layout();
  const auto send = [&](Op op, std::size_t frame, ConstBytes name) {
    const ShardFrame& part = layout.frames()[frame];
    std::vector<std::byte> payload(name.begin(), name.end());
    payload.resize(payload.size() + part.count * sizeof(float));
    ServeMessage message;
    message.header.op = op;
    message.header.flags = static_cast<std::uint8_t>(
        (frame == 0 ? kFirst : 0) | (frame + 1 == layout.frames().size() ? kLast : 0));
    message.header.first = part.first;
    message.header.count = static_cast<std::uint32_t>(part.count);
    message.payload = payload;
    return op == Op::kSet ? shard.set(1, message) : shard.push(1, message);
  };
  const StagedPush name{1, {2, 3}};
  const auto name_bytes = std::as_bytes(std::span(&name, 1));
  for (std::size_t i = 0; i < layout.frames().size(); ++i) send(Op::kSet, i, {});
  const std::vector<std::byte> fold =
      pack(std::vector<Command>{command::FoldPushes{"g", 1, {{2, 3}}}});
  for (std::size_t i = 0; i + 1 < layout.frames().size(); ++i)
    send(Op::kPush, i, i == 0 ? name_bytes : ConstBytes());
  EXPECT_THROW(shard.ask(fold, true), InvalidArgument);
  EXPECT_THROW(send(Op::kPush, 0, {}), InvalidArgument);  // too short for its name
  for (std::size_t i = 0; i < layout.frames().size(); ++i)
    send(Op::kPush, i, i == 0 ? name_bytes : ConstBytes());
  EXPECT_FALSE(shard.ask(fold, true).empty());
}

TEST(StagedPush, CountsInTheBoundOfMemoryWhileItArrives) {
  const ParameterTable table = staged_table(1);
  const std::uint64_t each = table.elements() * sizeof(float);
  Shard shard(table, 0, /*memory=*/2 * 3 * each);  // half: the parameters and two pushes
  const auto& frames = shard.layout().frames();
  ASSERT_GT(frames.size(), 1U);
  const auto send = [&](Op op, ClientId client, std::size_t frame) {
    const StagedPush name{1, {client, 0}};
    const bool named = op == Op::kPush && frame == 0;
    std::vector<std::byte> payload((named ? sizeof name : 0) + frames[frame].count * sizeof(float));
    if (named) std::memcpy(payload.data(), &name, sizeof name);
    ServeMessage message;
    message.header.op = op;
    message.header.flags = static_cast<std::uint8_t>((frame == 0 ? kFirst : 0) |
                                                     (frame + 1 == frames.size() ? kLast : 0));
    message.header.first = frames[frame].first;
    message.header.count = static_cast<std::uint32_t>(frames[frame].count);
    message.payload = payload;
    return op == Op::kSet ? shard.set(client, message) : shard.push(client, message);
  };
  const auto rest = [&](ClientId client) {
    for (std::size_t i = 1; i + 1 < frames.size(); ++i) send(Op::kPush, client, i);
    return send(Op::kPush, client, frames.size() - 1);
  };
  for (std::size_t i = 0; i < frames.size(); ++i) send(Op::kSet, 1, i);
  for (const ClientId client : {1, 2, 3}) send(Op::kPush, client, 0);
  const auto third = rest(3);
  EXPECT_EQ(third->refused, Refusal::kInvalid);
  EXPECT_NE(third->why.find("3 staged pushes"), std::string::npos) << third->why;
  shard.leave(2);  // and gives its room back
  send(Op::kPush, 3, 0);
  EXPECT_EQ(rest(3)->refused, Refusal::kNone);
  EXPECT_EQ(rest(1)->refused, Refusal::kNone);
  EXPECT_EQ(shard.vectors()->staged(), 2U);
}

}  // namespace serve_vectors_test
}  // namespace gradwire::serve
