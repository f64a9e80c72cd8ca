// The links of a simulated network, which messages pass one after the other: out of the sender's
// groups, from the inside out, then into the receiver's.
#pragma once

#include <vector>

#include "gradwire/base/link_cost.h"
#include "gradwire/base/wire.h"
#include "gradwire/schedule/cost.h"

namespace gradwire::schedule {

class SimulatedLinks {
 public:
  SimulatedLinks(const CostModel& model, const Workload& work, int ranks);

  bool together(Rank a, Rank b) const { return host(a) == host(b); }
  const LinkCost& cost(Rank src, Rank dst) const {
    return together(src, dst) ? model_.within : model_.between;
  }
  // Returns how many times longer everything takes on the rank's processor.
  double slowness(Rank rank) const { return rank == 0 ? work_.network.slow : 1; }
  // Returns whether links on one way may have different rates.
  bool uneven() const { return work_.network.slow != 1 || !work_.network.levels.empty(); }

  int hops(Rank src, Rank dst) const { return 2 * crossed(src, dst); }
  // Lets the first bit of a message enter the link of its hop at `time`. Must be called in the
  // order of these times. Returns when that bit is at the next link or, for the last hop, when all
  // of the bits have arrived. `last_bit` is when the last bit has passed the links before.
  double pass(Rank src, Rank dst, int hop, double bytes, double time, double& last_bit);

  // Adds a message to all of its links at once; `most` returns the seconds of the busiest link.
  void carry(Rank src, Rank dst, double bytes);
  double most() const;

 private:
  // One direction of a link; `free` is the time from which it is.
  struct Direction {
    double beta = 0, latency = 0, burst = 0, mixed = 0;
    double free = 0;
    Rank last = -1;  // whose message it has carried last; -1 for none
  };
  // The links of all ranks, of all hosts, or of all groups of one level.
  struct Tier {
    std::vector<Direction> out, in;
  };

  int host(Rank rank) const { return work_.host_of.empty() ? 0 : work_.host_of[at(rank)]; }
  int crossed(Rank src, Rank dst) const;
  std::size_t group(std::size_t level, Rank rank) const {
    return at(work_.network.levels[level].group(rank));
  }
  Direction& link(Rank src, Rank dst, int hop);
  std::size_t number(std::size_t tier, Rank rank, Rank src, Rank dst) const;
  void add_tier(std::size_t count, const LinkCost& cost, std::size_t slow);

  const CostModel& model_;
  const Workload& work_;
  std::vector<Tier> tiers_;  // of ranks, of hosts, then of the network's levels
};

}  // namespace gradwire::schedule
