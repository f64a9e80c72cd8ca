#include "gradwire/schedule/simulated_links.h"

#include <gtest/gtest.h>

#include "gradwire/schedule/frames.h"
#include "schedule_catalogue.h"

namespace gradwire::schedule {
namespace schedule_simulated_links_test {

constexpr double kBytes = 1e6;
constexpr double kBeta = 1e-9;         // of a host's link
constexpr double kLatency = 1e-3;      // the same
constexpr double kRackBeta = 4e-9;     // of a rack's link
constexpr double kRackLatency = 2e-3;  // the same
constexpr double kWire = kBytes + kHeaderBytes;

// Nothing but links takes time.
CostModel links_only() {
  CostModel model;
  model.cores = 1000;
  model.codecs[kAnyCodec] = {};
  model.between.beta = kBeta;
  model.between.latency = kLatency;
  return model;
}

// Hosts of one rank each, two in a rack.
Workload racks(const Schedule& schedule, double slow = 1, int uplinks = 1) {
  Workload work;
  work.chunks.assign(static_cast<std::size_t>(schedule.chunks), kBytes / schedule.chunks);
  for (Rank r = 0; r < schedule.ranks; ++r) work.host_of.push_back(r);
  work.network = {{{2, kRackBeta, kRackLatency, uplinks}}, slow};
  return work;
}

Schedule copies(int ranks, const std::vector<std::pair<Rank, Rank>>& pairs) {
  Builder out(ranks, 1);
  for (const auto& [src, dst] : pairs) out.copy(0, src, dst, {0, 1});
  return std::move(out).build(Collective::kBroadcast, "copies");
}

double seconds(const Schedule& schedule, double slow = 1, int uplinks = 1) {
  return simulate(schedule, links_only(), racks(schedule, slow, uplinks));
}

TEST(SimulatedLinks, AMessageTakesTheLinksOfTheGroupsThatItLeaves) {
  EXPECT_DOUBLE_EQ(seconds(copies(4, {{0, 1}})), kLatency + kBeta * kWire);
  EXPECT_DOUBLE_EQ(seconds(copies(4, {{1, 2}})), kLatency + kRackLatency + kRackBeta * kWire);
}

TEST(SimulatedLinks, MessagesOfARackShareItsLink) {
  const double alone = kLatency + kRackLatency + kRackBeta * kWire;
  EXPECT_DOUBLE_EQ(seconds(copies(4, {{0, 2}, {1, 3}})), alone + kRackBeta * kWire);
  EXPECT_DOUBLE_EQ(seconds(copies(4, {{0, 2}, {3, 1}})), alone);
}

TEST(SimulatedLinks, AFlowHasOneOfSeveralUplinks) {
  const double one = seconds(copies(2, {{0, 1}}), 1, 1);
  EXPECT_DOUBLE_EQ(one, kLatency + kBeta * kWire);  // it stays in the rack
  EXPECT_DOUBLE_EQ(seconds(copies(4, {{0, 2}}), 1, 4),
                   kLatency + kRackLatency + 4 * kRackBeta * kWire);
}

TEST(SimulatedLinks, RankZeroIsSlowAndItsHostsLink) {
  EXPECT_DOUBLE_EQ(seconds(copies(4, {{0, 1}}), 3), kLatency + 3 * kBeta * kWire);
  EXPECT_DOUBLE_EQ(seconds(copies(4, {{3, 2}}), 3), kLatency + kBeta * kWire);
  CostModel model = links_only();
  model.move = 1e-9;
  const Schedule copy = copies(4, {{0, 1}});
  const Workload plain = racks(copy), slow = racks(copy, 3);
  EXPECT_DOUBLE_EQ(simulate(copy, model, slow) - simulate(copy, model, plain),
                   2 * (kBeta * kWire + model.move * kBytes));
}

TEST(SimulatedLinks, NoRunIsFasterThanTheBusiestPart) {
  CostModel model = links_only();
  model.move = model.gamma = 1e-10;
  model.within.alpha = model.between.alpha = 1e-6;
  for (const char* name : {"ring", "halving_doubling", "binary_tree", "direct", "star"}) {
    const Schedule schedule = all_reduce_by(name, 8);
    for (double slow : {1.0, 3.0}) {
      Workload work = racks(schedule, slow);
      work.segments = 4;
      const Frames frames(schedule, model, work);
      EXPECT_GE(1.000001 * simulate(schedule, model, work), most_work(frames, model, work))
          << name << " " << slow;
    }
  }
}

}  // namespace schedule_simulated_links_test
}  // namespace gradwire::schedule
