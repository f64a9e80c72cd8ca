#include "gradwire/schedule/cost.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "gradwire/base/error.h"
#include "gradwire/schedule/frames.h"
#include "schedule_catalogue.h"
#include "schedule_costs.h"

namespace gradwire::schedule {
namespace schedule_cost_test {

// What one message takes that nothing holds up, from staging to landing.
double hop(const CostModel& model, double bytes) {
  const LinkCost& link = model.within;
  return 2 * link.alpha + link.latency + (link.beta + 2 * link.copy) * (bytes + kHeaderBytes);
}

CostModel links(double alpha, double latency, double beta) {
  CostModel model = free_of_cost();
  model.within = {alpha, latency, beta, 0};
  return model;
}

Schedule chain(int ranks) {
  Builder out(ranks, 1);
  for (Rank r = 0; r + 1 < ranks; ++r) out.copy(r, r, r + 1, {0, 1});
  return std::move(out).build(Collective::kBroadcast, "chain");
}

#define EXPECT_ABOUT(a, b) EXPECT_NEAR((a) / (b), 1.0, 1e-9)

TEST(Simulate, RingIsItsClosedForm) {
  CostModel model = links(3e-6, 5e-6, 1e-9);
  model.gamma = 2e-10;
  model.move = 1e-10;
  for (int p = 2; p <= 12; ++p) {
    const double n = kBytes / p;
    const double each = hop(model, n) + model.move * n;  // staged
    const double expected = (p - 1) * (2 * each + (model.gamma + model.move) * n);
    EXPECT_ABOUT(seconds(all_reduce_by("ring", p), model), expected) << p;
  }
}

TEST(Simulate, ButterfliesAreTheirClosedForms) {
  CostModel model = links(3e-6, 5e-6, 1e-9);
  model.gamma = 2e-10;
  for (int p = 2, rounds = 1; p <= 32; p *= 2, ++rounds) {
    const double doubling = rounds * (hop(model, kBytes) + model.gamma * kBytes);
    EXPECT_ABOUT(seconds(all_reduce_by("recursive_doubling", p), model), doubling) << p;
    double halving = 0;
    for (int share = 2; share <= p; share *= 2)
      halving += 2 * hop(model, kBytes / share) + model.gamma * kBytes / share;
    EXPECT_ABOUT(seconds(all_reduce_by("halving_doubling", p), model), halving) << p;
  }
}

TEST(Simulate, ARoundCostsOnceHoweverManyMessages) {
  CostModel model = free_of_cost();
  model.round = 1e-6;
  for (int p = 2; p <= 12; ++p) {
    EXPECT_ABOUT(seconds(all_reduce_by("ring", p), model), 2 * (p - 1) * model.round) << p;
    EXPECT_ABOUT(seconds(all_reduce_by("direct", p), model), 2 * model.round) << p;
  }
}

// The NIC of a rank sends one message after the other, and no NIC receives two at a time.
TEST(Simulate, DirectIsBoundByTheNics) {
  const CostModel model = links(0, 0, 1e-9);
  for (int p = 2; p <= 12; ++p) {
    const double message = model.within.beta * (kBytes / p + kHeaderBytes);
    EXPECT_ABOUT(seconds(all_reduce_by("direct", p), model), 2 * (p - 1) * message) << p;
  }
}

TEST(Simulate, TheRootOfAStarIsTheBottleneck) {
  const CostModel wire = links(0, 0, 1e-9);
  CostModel adds = free_of_cost();
  adds.gamma = 1e-9;
  for (int p = 2; p <= 9; ++p) {
    const Schedule star = all_reduce_by("star", p);
    EXPECT_ABOUT(seconds(star, wire), 2 * (p - 1) * wire.within.beta * (kBytes + kHeaderBytes));
    EXPECT_ABOUT(seconds(star, adds), (p - 1) * adds.gamma * kBytes);
  }
}

TEST(Simulate, SegmentsFollowEachOtherDownAChain) {
  const CostModel model = links(0, 7e-6, 1e-9);
  for (int p : {2, 3, 6})
    for (int segments : {1, 2, 5, 64}) {
      const double one = model.within.beta * (kBytes / segments + kHeaderBytes);
      // A segment is on the wire of the first link while others are on the next ones.
      const double expected = (segments + p - 2) * one + (p - 1) * model.within.latency;
      EXPECT_ABOUT(seconds(chain(p), model, kBytes, segments), expected) << p << " " << segments;
    }
}

TEST(Simulate, AReadMessageIsStagedOnceForAll) {
  CostModel model = free_of_cost();
  model.move = 1e-9;
  const Schedule star = generate(recipe_of(Collective::kBroadcast, "star", 8));
  EXPECT_ABOUT(seconds(star, model), 2 * model.move * kBytes);
  model.within.copy = 1e-9;  // but a kernel copies for each reader
  const double copy = model.within.copy * (kBytes + kHeaderBytes);
  EXPECT_ABOUT(seconds(star, model), 2 * model.move * kBytes + (7 + 1) * copy);
}

TEST(Simulate, RanksShareTheCoresOfTheirHost) {
  CostModel model = free_of_cost();
  model.move = model.gamma = 1e-9;
  for (int p : {4, 8, 16}) {
    const Schedule ring = all_reduce_by("ring", p);
    const double alone = seconds(ring, model, kBytes, 4);
    CostModel crowded = model;
    crowded.cores = 2;
    const double shared = seconds(ring, crowded, kBytes, 4);
    EXPECT_GE(shared, alone * p / 2 * (1 - 1e-9)) << p;
    EXPECT_LE(shared, alone * p / 2 * 1.15) << p;
    crowded.turn = 1e-5;
    EXPECT_GE(seconds(ring, crowded, kBytes, 4), shared + 1e-5);
  }
}

// Two ranks on one core: each, when its turn comes, ends a call and begins the next one.
TEST(Simulate, WhoHasTheCoreGoesOnWithTheNextCall) {
  CostModel model = free_of_cost();
  model.cores = 1;
  model.turn = 1e-6;
  EXPECT_ABOUT(seconds(all_reduce_by("recursive_doubling", 2), model), model.turn);
  model.call = 1e-6;
  EXPECT_ABOUT(seconds(all_reduce_by("recursive_doubling", 2), model), model.turn + 2 * model.call);
}

TEST(Simulate, WhoWaitsTakesTurnsWithNothingToDo) {
  CostModel model = free_of_cost();
  model.cores = 2;
  model.turn = 1e-6;
  // Between a leaf's message and the root's answer all others of its core have a turn.
  for (int p : {4, 6, 8}) EXPECT_GE(seconds(all_reduce_by("star", p), model), p / 2 * 0.99e-6) << p;
  const double gathered = seconds(generate(recipe_of(Collective::kAllGather, "direct", 8)), model);
  const double doubled = seconds(all_reduce_by("recursive_doubling", 8), model);
  EXPECT_LT(gathered, doubled);
  EXPECT_LT(doubled, seconds(all_reduce_by("ring", 8), model));
}

TEST(Simulate, NoRankMissesItsFirstTurn) {
  CostModel model = default_model(kMemory, kTcp, 2);
  const auto from = [&](Rank root) {
    return seconds(generate(recipe_of(Collective::kBroadcast, "star", 8, root)), model, 4);
  };
  EXPECT_LE(from(0), from(2));
  EXPECT_LE(from(2), from(4));
}

TEST(Simulate, CardsAreNotSharedOutAsCoresAre) {
  CostModel model = links(0, 0, 1e-9);
  const double alone = seconds(all_reduce_by("ring", 8), model);
  model.cores = 1;
  EXPECT_ABOUT(seconds(all_reduce_by("ring", 8), model), alone);
}

TEST(Simulate, RanksOfAHostShareItsCardToOthers) {
  CostModel model = free_of_cost();
  model.between.beta = 1e-9;
  const Schedule direct = all_reduce_by("direct", 4);
  Workload work = even(direct, kBytes);
  work.host_of = {0, 0, 1, 1};
  // In each half two ranks send two messages each.
  const double message = model.between.beta * (kBytes / 4 + kHeaderBytes);
  EXPECT_ABOUT(simulate(direct, model, work), 2 * 4 * message);
}

TEST(Simulate, ALossyCodecWorksWhereTheSchedulesPartsAre) {
  CostModel model = links(0, 0, 1e-9);
  const Schedule ring = all_reduce_by("ring", 4);
  Workload work = even(ring, kBytes);
  work.codec = CodecCost{2e-9, 3e-9};
  work.ratio = 0.5;
  const double n = kBytes / 4;
  const double wire = 6 * model.within.beta * (n / 2 + kHeaderBytes);
  // Encoded at each hop; the finished part once, which its owner adopts; then forwarded.
  const double codec = n * (3 * 2e-9 + 3 * 3e-9 + (2e-9 + 3e-9) + 3 * 3e-9);
  EXPECT_ABOUT(simulate(ring, model, work), wire + codec);
}

TEST(Simulate, FarMemoryIsSlowerFromOctaveToOctave) {
  CostModel model = free_of_cost();
  model.far = {2, 4, 5, 7, 8};
  constexpr double kKiB = 1024;
  EXPECT_EQ(model.growth(4), 1);
  EXPECT_EQ(model.growth(64 * kKiB), 1);
  EXPECT_ABOUT(model.growth(256 * kKiB), 1 + 2 / 3.0);
  EXPECT_EQ(model.growth(512 * kKiB), 2);
  EXPECT_EQ(model.growth(4 * 1024 * kKiB), 4);
  EXPECT_EQ(model.growth(8 * 1024 * kKiB), 5);
  EXPECT_ABOUT(model.growth(12 * 1024 * kKiB), 6);
  EXPECT_EQ(model.growth(32 * 1024 * kKiB), 8);
  EXPECT_EQ(model.growth(1e12), 8);
  model.move = 1e-9;
  const Schedule copy = chain(2);
  EXPECT_ABOUT(seconds(copy, model, 512 * kKiB), 2 * 2e-9 * 512 * kKiB);
}

// A ring adds to, and lands on, another chunk in each round, and sends on what it has landed.
// Recursive doubling works on all of the array in each round.
TEST(Simulate, OnlyWhatARankHasNotTouchedForRoundsIsFar) {
  CostModel model = free_of_cost();
  model.far = {3, 3, 3, 3, 3};
  const double bytes = 512 * 1024;
  for (const auto& [move, gamma] : {std::pair{1e-9, 0.0}, std::pair{0.0, 1e-9}}) {
    model.move = move;
    model.gamma = gamma;
    for (int p : {4, 8}) {
      const int rounds = p == 4 ? 2 : 3;
      const double doubling = (rounds + (gamma == 0 ? 2 : 0)) * (move + gamma) * bytes;
      EXPECT_ABOUT(seconds(all_reduce_by("recursive_doubling", p), model, bytes), doubling) << p;
      const double chunk = (move + gamma) * bytes / p;
      const double ring = gamma == 0 ? 3 * p + 2 * p - 3 : 3 * (p - 1);
      EXPECT_ABOUT(seconds(all_reduce_by("ring", p), model, bytes), ring * chunk) << p;
    }
  }
}

TEST(Simulate, ABurstPassesAnIdleNicAtOnce) {
  CostModel model = links(0, 5e-3, 1e-9);
  std::swap(model.within, model.between);
  const Schedule copy = chain(2);
  auto found = [&](double bytes, double burst) {
    model.between.burst = burst;
    return simulate(copy, model, {{bytes}, 1, {0, 1}});
  };
  EXPECT_ABOUT(found(1e6, 0), 5e-3 + 1e-9 * (1e6 + kHeaderBytes));
  EXPECT_ABOUT(found(1e6, 4e5 + kHeaderBytes), 5e-3 + 1e-9 * 6e5);
  EXPECT_ABOUT(found(1e6, 2e6), 5e-3);
}

TEST(Simulate, MessagesOfChangingSendersTakeLonger) {
  CostModel model = links(0, 0, 1e-9);
  const double plain = 1e-9 * (kBytes + kHeaderBytes);
  const Schedule star = generate(recipe_of(Collective::kReduce, "star", 4));
  EXPECT_ABOUT(seconds(star, model), 3 * plain);
  model.within.mixed = 1e-9;
  EXPECT_ABOUT(seconds(star, model), 5 * plain);
  EXPECT_ABOUT(seconds(chain(4), model), 3 * plain);
}

TEST(Simulate, HostsMayShareTheirCores) {
  CostModel model = free_of_cost();
  model.move = model.gamma = 1e-9;
  model.turn = 1e-6;
  model.cores = 2;
  const Schedule ring = all_reduce_by("ring", 8);
  const Workload together = even(ring, kBytes, 4);
  Workload apart = together;
  apart.host_of = {0, 1, 2, 3, 4, 5, 6, 7};
  EXPECT_LT(simulate(ring, model, apart), 0.3 * simulate(ring, model, together));
  model.sharing = 8;
  EXPECT_EQ(simulate(ring, model, apart), simulate(ring, model, together));
  model.sharing = 4;  // two machines
  EXPECT_LT(simulate(ring, model, apart), 0.6 * simulate(ring, model, together));
}

TEST(Predict, HostsThatShareTheirCoresAddUpInTurns) {
  CostModel model = free_of_cost();
  model.gamma = 1e-9;
  model.cores = 1;
  const Schedule direct = generate({Collective::kAllGather, "direct", 4, 0, {{0}, {1}, {2}, {3}}});
  const Question question{Collective::kAllReduce, 4, 0, 1000, {{0}, {1}, {2}, {3}}};
  const double alone = predict_gathered(model, direct, question);
  EXPECT_DOUBLE_EQ(alone, 3e-6);
  model.sharing = 2;
  EXPECT_DOUBLE_EQ(predict_gathered(model, direct, question), 2 * alone);
  model.sharing = 4;
  model.cores = 2;
  EXPECT_DOUBLE_EQ(predict_gathered(model, direct, question), 2 * alone);
}

TEST(Predict, ExtrapolatesFromSegmentsThatFollowEachOtherAtOnePace) {
  const CostModel model = default_model(kMemory, kTcp, 2);
  constexpr int kSegments = 400;  // as many as predict() cuts the array into
  const double bytes = kSegments * (static_cast<double>(kUsualFrame) - kHeaderBytes);
  for (int ranks : {8, 16, 32, 64}) {
    const Schedule tree = all_reduce_by("binary_tree", ranks);
    Question question{Collective::kAllReduce, ranks, 0, bytes};
    Workload work = even(tree, bytes, kSegments);
    for (Rank r = 0; r < ranks; ++r) {
      question.hosts.push_back({r});
      work.host_of.push_back(r);
    }
    const double all = simulate(tree, model, work);
    EXPECT_NEAR(predict(model, tree, question) / all, 1, 0.05) << ranks;
  }
}

TEST(Simulate, GivesUpBeyondTheLimit) {
  const CostModel model = links(1e-6, 0, 1e-9);
  const Schedule ring = all_reduce_by("ring", 4);
  const double all = seconds(ring, model);
  EXPECT_EQ(simulate(ring, model, even(ring, kBytes), all * 1.001), all);
  EXPECT_TRUE(std::isinf(simulate(ring, model, even(ring, kBytes), all / 2)));
}

TEST(Simulate, RefusesAWorkloadOfAnotherSchedule) {
  const Schedule ring = all_reduce_by("ring", 4);
  EXPECT_THROW(simulate(ring, {}, {{1, 2, 3}, 1}), InvalidArgument);
  EXPECT_THROW(simulate(ring, {}, {{1, 2, 3, 4}, 0}), InvalidArgument);
  EXPECT_THROW(simulate(ring, {}, {{1, 2, 3, 4}, 1, {0, 0}}), InvalidArgument);
}

TEST(Simulate, EveryScheduleIsAboveItsBoundsAndGrowsWithEachParameter) {
  std::mt19937 random(7);
  for (const Recipe& recipe : all_recipes(9)) {
    if (recipe.ranks < 2) continue;
    const Schedule schedule = generate(recipe);
    const ScheduleShape shape = verify(schedule).shape;
    const CostModel model = random_model(random);
    for (int segments : {1, 3}) {
      const double found = seconds(schedule, model, kBytes, segments);
      EXPECT_EQ(found, seconds(schedule, model, kBytes, segments));
      EXPECT_GE(found, shape.max_sent * kBytes * std::max(model.within.beta, model.within.copy))
          << label(recipe);
      const Workload work = even(schedule, kBytes, segments);
      EXPECT_GE(found, most_work(Frames(schedule, model, work), model, work)) << label(recipe);
      for (const auto& [name, value] : model.parameters()) {
        if (name == "cores" || name == "sharing" || of_arrivals(name)) continue;
        CostModel slower = model;
        slower.set(name, 2 * value);
        // What comes later may meet an emptier queue: the anomalies of Graham 1969.
        EXPECT_GE(seconds(schedule, slower, kBytes, segments), found * 0.97)
            << label(recipe) << " " << name << " " << segments;
      }
    }
  }
}

TEST(Wavefront, HasEveryPlaceOnceInThePlansOrder) {
  const std::vector<std::vector<int>> all = {{}, {0}, {0, 2}, {0, 2, 4, 6, 8, 10, 12}, {0, 2, 10}};
  for (const std::vector<int>& starts : all)
    for (int segments : {1, 2, 3, 9}) {
      const std::vector<WavefrontStep> order = wavefront(starts, segments);
      EXPECT_EQ(order.size(), starts.size() * static_cast<std::size_t>(segments));
      for (std::size_t i = 1; i < order.size(); ++i) {
        const auto key = [&](const WavefrontStep& place) {
          const int start = starts[static_cast<std::size_t>(place.round)];
          return std::pair(start + place.segment, place.segment);
        };
        EXPECT_LT(key(order[i - 1]), key(order[i]));
      }
    }
}

TEST(Wavefront, LetsMoreSegmentsBeOnTheirWayToAnotherSite) {
  const Schedule schedule =
      generate({Collective::kAllReduce, "hierarchical(ring,ring)", 4, 0, {{0, 1}, {2, 3}}});
  const auto starts = [&](const std::vector<int>& site_of, int segments) {
    return starts_of(rounds_between_sites(schedule, site_of), segments);
  };
  EXPECT_EQ(starts({}, 100), (std::vector{0, 2, 4, 6}));
  EXPECT_EQ(starts({0, 0, 0, 0}, 100), starts({}, 100));
  EXPECT_EQ(starts({0, 0, 1, 1}, 100), (std::vector{0, 12, 24, 36}));
  EXPECT_EQ(starts({0, 0, 1, 1}, 8), (std::vector{0, 4, 8, 12}));
  EXPECT_EQ(starts({0, 0, 1, 1}, 1), (std::vector{0, 2, 4, 6}));
}

TEST(Cut, DealsEverySliceToOneSegment) {
  for (int segments : {1, 2, 5, 12})
    for (int slices = 1; slices <= segments; ++slices)
      for (int first : {0, 3, 100})
        for (int chunks : {1, 2, 7, 40}) {
          const Cut cut{segments, slices};
          std::vector<int> expected(static_cast<std::size_t>(segments), 0);
          for (int c = first; c < first + chunks; ++c)
            for (int j = 0; j < slices; ++j)
              ++expected[static_cast<std::size_t>((cut.segment_of_first(c) + j) % segments)];
          int frames = 0;
          for (int s = 0; s < segments; ++s) {
            const int found = cut.slices_in(first, chunks, s);
            EXPECT_EQ(found, expected[static_cast<std::size_t>(s)]);
            EXPECT_LE(found, (chunks * slices + segments - 1) / segments);
            frames += found > 0;
          }
          EXPECT_EQ(frames, cut.frames_of(chunks));
        }
}

TEST(Cut, KeepsSlicesOfSmallChunksWhole) {
  constexpr double kMiB = 1 << 20;
  EXPECT_EQ(cut_into(9, kMiB, kMiB).slices, 9) << "a chunk alone takes all segments";
  EXPECT_EQ(cut_into(64, 2 * kMiB, 8 * kMiB).slices, 64);
  EXPECT_EQ(cut_into(1024, 0.25 * kMiB, 128 * kMiB).slices, 32) << "none below 8 KiB";
  EXPECT_EQ(cut_into(1024, 1024, 128 * kMiB).slices, 1);
  EXPECT_EQ(cut_into(1, 0, 0).slices, 1);
}

TEST(CostModel, HasNamesForAllItsParameters) {
  CostModel model = default_model(kMemory, kTcp, 4), copy;
  model.sharing = 2;
  EXPECT_NE(model.digest(), 0U);
  copy.codecs = model.codecs;
  for (const auto& [name, value] : model.parameters()) {
    if (name != "cores" && value == 0) continue;
    EXPECT_NE(copy.digest(), model.digest()) << name;
    copy.set(name, value);
  }
  copy.within = model.within;
  EXPECT_EQ(copy.digest(), model.digest());
}

TEST(CostModel, RefusesWhatIsNoParameter) {
  CostModel model = default_model(kMemory, kTcp, 4);
  EXPECT_THROW(model.set("speed", 1), InvalidArgument);
  for (double value : {-1.0, 1e3, 1e300, std::nan(""), HUGE_VAL})
    EXPECT_THROW(model.set("within.alpha", value), InvalidArgument) << value;
  for (double value : {0.0, 1.5, -3.0, 1e7, std::nan("")})
    for (const char* name : {"cores", "sharing"})
      EXPECT_THROW(model.set(name, value), InvalidArgument) << name << value;
  model.set("between.burst", 1e6);
  EXPECT_THROW(model.set("between.burst", 1e13), InvalidArgument);
}

TEST(CostModel, FindsTheCostsOfACodecByItsName) {
  CostModel model = default_model(kMemory, kTcp, 4);
  model.codecs["topk"] = {1e-10, 2e-11};
  EXPECT_EQ(model.codec("topk:density=0.01").encode, 1e-10);
  EXPECT_EQ(model.codec("mine").encode, model.codecs.at(kAnyCodec).encode);
}

}  // namespace schedule_cost_test
}  // namespace gradwire::schedule
