// Frames: a Schedule as exec/plan/plan.h reads it, but for all ranks at once and with costs. All
// edges of a round between two ranks are one message, which has one frame per segment. Equal
// messages of one rank, to ranks on links of one kind, are staged once and form one send.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "gradwire/schedule/cost.h"
#include "gradwire/schedule/schedule.h"

namespace gradwire::schedule {

// Consecutive rounds of one segment are so many ticks apart: a rank may run so many segments ahead
// of its peers before it waits for them.
inline constexpr int kLag = 2;
// The same before and after a round in which messages go to other sites, at most: so many segments
// are on their way at once.
inline constexpr int kLagBetweenSites = 12;

// The default cut of a message: about so many segments, none below so many bytes.
inline constexpr std::size_t kSegmentsWanted = 4;
inline constexpr std::size_t kSmallestSegment = 32 * 1024;
// A chunk beside others in a message is cut into slices of at least so many bytes. With longer ones
// rounds overlap less: by the built-in model of 10 Gbit/s, 16 KiB take up to 9 % more time on 64
// and more ranks.
inline constexpr double kSmallestSlice = 8 * 1024;

// Returns the cut of a call whose chunks have `chunk` bytes, and its largest message `message`.
Cut cut_into(int segments, double chunk, double message);

// Returns, by round, whether some messages go to other sites. `site_of` is by rank; empty: there is
// one site.
std::vector<bool> rounds_between_sites(const Schedule& schedule, const std::vector<int>& site_of);

// Returns, by round, the tick at which its first segment stands in the order of all frames; each
// further segment stands one tick later. A landing waits for all that stand before it.
std::vector<int> starts_of(const std::vector<bool>& between_sites, int segments);

// One step of the order of all frames of a rank, in both directions: sorted by (start of the round
// + segment, segment).
struct WavefrontStep {
  int round = 0;
  int segment = 0;
};
std::vector<WavefrontStep> wavefront(const std::vector<int>& starts, int segments);

// Seconds of a processor: for chunks that the rank touches for the first time in a call, or has not
// touched for rounds, which grow with the call's size, and for chunks that are still in a cache.
struct Effort {
  double far = 0;
  double near = 0;
  double seconds(double growth) const { return far * growth + near; }
};

class Frames {
 public:
  // The edges of a round between two ranks, all segments together.
  struct RoundMessage {
    Rank src = 0;
    Rank dst = 0;
    int first_chunk = 0;
    int chunks = 0;
    double wire = 0;   // bytes of payload
    Effort work = {};  // to land it
  };
  struct Send {
    std::uint32_t first = 0;  // index into copies_
    std::uint32_t last = 0;
    Effort work = {};  // to stage it
  };

  Frames(const Schedule& schedule, const CostModel& model, const Workload& work);

  int ranks() const noexcept { return ranks_; }
  int rounds() const noexcept { return static_cast<int>(between_sites_.size()); }
  const std::vector<bool>& between_sites() const noexcept { return between_sites_; }
  // Returns whether no rank can finish before all have sent, so that no rank is more than one call
  // ahead.
  bool mutual() const noexcept { return mutual_; }
  const std::vector<RoundMessage>& messages() const noexcept { return messages_; }
  // Returns the messages that one send serves.
  std::span<const std::uint32_t> copies(const Send& send) const {
    return {copies_.data() + send.first, send.last - send.first};
  }
  // Returns a rank's sends in a round, in list order.
  std::span<const Send> sends(int round, Rank rank) const {
    const std::size_t i = index(round, rank);
    return {sends_.data() + sends_from_[i], sends_from_[i + 1] - sends_from_[i]};
  }
  std::span<const std::uint32_t> receives(int round, Rank rank) const {
    const std::size_t i = index(round, rank);
    return {receives_.data() + receives_from_[i], receives_from_[i + 1] - receives_from_[i]};
  }

 private:
  class FramesBuilder;
  std::size_t index(int round, Rank rank) const { return at(round) * at(ranks_) + at(rank); }

  int ranks_;
  std::vector<bool> between_sites_;  // by round
  bool mutual_;
  std::vector<RoundMessage> messages_;
  std::vector<Send> sends_;
  std::vector<std::uint32_t> copies_, receives_;
  std::vector<std::uint32_t> sends_from_, receives_from_;  // by round and rank, and the end
};

// Simulates a call whose chunks have only so many slices, and as many fewer segments. Each slice
// costs what it costs in the whole call.
double simulate(const Frames& frames, const CostModel& model, const Workload& work, int slices,
                double limit = std::numeric_limits<double>::infinity());

// Returns the seconds of all segments for the rank, the host's cores or the NIC that has the most
// to do: a lower bound on any run.
double most_work(const Frames& frames, const CostModel& model, const Workload& work);

}  // namespace gradwire::schedule
