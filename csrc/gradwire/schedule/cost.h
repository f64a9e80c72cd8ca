// The cost model and its two uses: a simulator, which is one more reader of a Schedule, and the
// choice of an algorithm.
//
// simulate() runs a schedule's frames on clocks. A rank is a processor that does one thing at a
// time: it alternates between staging what it may send and landing what has arrived, both in the
// order of exec/plan/plan.h and under its two conditions. A frame of w wire bytes to k peers takes
//
//     at the sender      the codec's time, once, and alpha + copy·w for each peer
//     on the way         beta·w on the NIC of the sender, latency, beta·w on the receiver's NIC:
//                        a NIC does one message at a time, in each direction; bits pass through
//     at the receiver    alpha + copy·w, and the codec's time to land it
//
// and each rank spends `round` in each round, and for each segment, before its first message there.
//
// Within a host each rank has a NIC of its own (beta is 0, unless links are emulated); between
// hosts all ranks of a host share one. A NIC that was idle lets `burst` bytes pass at once, as a
// token bucket does, and takes mixed·w longer for a message that follows one of another sender.
//
// Where the network has levels beyond the hosts, such as racks, a message that leaves a group takes
// its link out, and the other group's link in, too; bits pass through.
//
// Encoding, decoding, copying and adding take longer in large calls, for chunks that the rank has
// not touched in this round or the one before (`far`).
//
// Where a host, or `sharing` hosts on one machine, have more ranks than cores, several ranks share
// a core. The rank on the core works until it must wait, then yields. Waiting ranks get the core in
// turns, each of which takes `turn` whether there is something to do or not. Then successive calls
// are simulated: a rank goes on with the next call while it has the core.
//
// Every machine computes the same bits: doubles, a fixed order, nothing fused. All ranks of a
// communicator have one model, so they choose alike.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gradwire/base/link_cost.h"
#include "gradwire/base/wire.h"
#include "gradwire/schedule/generators.h"
#include "gradwire/schedule/schedule.h"

namespace gradwire::schedule {

// Seconds of a processor per byte of the caller's array.
struct CodecCost {
  double encode = 0;
  double decode = 0;
};

struct CostModel {
  LinkCost within;   // pairs of ranks on one host
  LinkCost between;  // all other pairs
  double call = 0;   // seconds per call, however small
  // Seconds of a processor per round in which a rank sends or receives, however many messages: on
  // GPUs the launches of a round's kernels and of its group of messages.
  double round = 0;
  double move = 0;   // seconds of a processor per byte copied to or from staging
  double gamma = 0;  // seconds of a processor per byte added from staging
  double turn = 0;   // seconds until another rank runs on a core
  int cores = 1;     // of each host
  int sharing = 1;   // neighbouring hosts that share these cores, as containers of a machine do
  // The cost of far memory: seconds of a processor per byte grow by these factors for calls of 512
  // KiB, 4, 8, 16 and 32 MiB per rank: where the last cache ends, they grow much within an octave.
  // The factor is 1 up to 64 KiB and grows linearly with the octaves between these sizes.
  std::array<double, 5> far{1, 1, 1, 1, 1};
  std::map<std::string, CodecCost> codecs;  // by name, without parameters

  const CodecCost& codec(std::string_view name) const;  // by name or spec; else kAnyCodec's

  // The parameters under flat names: "within.alpha", "far.4M", "fp16.encode". set() throws
  // InvalidArgument for any other name, and unless the value is at least 0 and below 1000 (of a
  // burst: below 10^12; for cores and sharing: a whole number from 1 to a million).
  std::vector<std::pair<std::string, double>> parameters() const;
  void set(const std::string& name, double value);
  std::uint64_t digest() const;  // of all of these; never 0

  double growth(double bytes) const;  // the factor of `far` for a call of so many bytes
};

// Returns sensible values, given the costs of links between ranks of one host and of different
// hosts. They include a codec of unknown speed, kAnyCodec.
CostModel default_model(const LinkCost& within, const LinkCost& between, int cores);

inline constexpr const char* kAnyCodec = "any";  // stands for any codec without costs of its own
inline constexpr double kHeaderBytes = 32;       // of each frame, on the wire

// Groups of hosts, such as racks or sites, each of which one link joins to the rest, in both
// directions. Ranks are in order, group k has those from k·ranks on, unless `group_of` is set.
struct Level {
  int ranks = 1;       // of a group; a multiple of the ranks of a group of the level below
  double beta = 0;     // seconds per byte of the link
  double latency = 0;  // seconds one way
  int uplinks = 1;  // equal parts of the link; all messages between two hosts take the same of them
  std::vector<int> group_of = {};  // by rank

  int group(Rank rank) const { return group_of.empty() ? rank / ranks : group_of[at(rank)]; }
};

// Returns the number of each rank's group.
std::vector<int> group_of(int ranks, const std::vector<std::vector<Rank>>& groups);

// Groups of hosts that are far apart, where each byte between them counts.
struct Sites {
  std::vector<std::vector<Rank>> ranks = {};  // of each; empty: all are in one
  double latency = 0;                         // seconds one way between two of them
  double beta = 0;                            // seconds per byte of each one's link to the others
};

// What a network is beside hosts that reach each other at their own rates.
struct Network {
  std::vector<Level> levels = {};  // from the inside out
  double slow = 1;                 // so many times slower is rank 0, and its host's link
};

// How a call is cut into segments, which run through the schedule independently of each other. Each
// chunk of the schedule is cut into `slices`, the chunks of a plan (exec/plan/plan.h): number j of
// chunk c is in segment (c · slices + j) mod segments. So one chunk travels in `slices` frames, and
// many together in up to `segments`, each of which has about as many slices.
struct Cut {
  int segments = 1;
  int slices = 1;  // of each chunk of the schedule; at most as many as there are segments

  int segment_of_first(int chunk) const {
    return static_cast<int>(std::int64_t{chunk} * slices % segments);
  }
  // Returns how many slices a segment has of so many chunks, from `first` on.
  int slices_in(int first, int chunks, int segment) const {
    const std::int64_t all = std::int64_t{chunks} * slices;
    const int after = (segment - segment_of_first(first) + segments) % segments;
    return static_cast<int>(all / segments + (after < all % segments ? 1 : 0));
  }
  int frames_of(int chunks) const {
    return static_cast<int>(std::min<std::int64_t>(segments, std::int64_t{chunks} * slices));
  }
};

// The call for which a schedule is simulated.
struct Workload {
  std::vector<double> chunks;  // bytes of each, in the caller's arrays
  int segments = 1;
  std::vector<int> host_of = {};        // by rank; empty: all ranks on one host
  std::optional<CodecCost> codec = {};  // set for a lossy codec
  double ratio = 1;                     // wire bytes per byte of the array
  Network network = {};
  int slices = 0;                 // of each chunk; 0: as many as there are segments
  std::vector<int> site_of = {};  // by rank; empty: all ranks at one site
  bool between_sites = false;     // the codec encodes only what goes between sites

  Cut cut() const { return {segments, slices == 0 ? segments : slices}; }
};

double total_bytes(const Workload& work);

// Returns the seconds until the last rank has finished or, where ranks share cores, the seconds of
// one call in a series; infinity as soon as that is more than `limit`.
double simulate(const Schedule& schedule, const CostModel& model, const Workload& work,
                double limit = std::numeric_limits<double>::infinity());

// The call for which an algorithm is chosen. `bytes` counts all chunks together.
struct Question {
  Collective collective = Collective::kAllReduce;
  int ranks = 1;
  Rank root = 0;
  double bytes = 0;
  std::vector<std::vector<Rank>> hosts = {};  // the ranks of each; empty: one host
  Sites sites = {};                           // hosts lie in them
  std::optional<CodecCost> codec = {};        // set for a lossy codec; the schedule is then in-tree
  double ratio = 1;
  bool between_sites = false;         // the codec encodes only what goes between sites
  double most_message = kUsualFrame;  // bytes of a frame, at most; infinity: no limit, as on GPUs
  Network network = {};               // predict() alone takes it
};

// Returns the seconds of a call by a schedule of the caller's choice, cut into the segments that
// exec/plan/plan.h would choose: one where frames have no limit.
double predict(const CostModel& model, const Schedule& schedule, const Question& question);
// Returns the seconds of a sum of so many bytes whose inputs reach all ranks by `all_gather`.
double predict_gathered(const CostModel& model, const Schedule& all_gather,
                        const Question& question);

struct Choice {
  std::string algorithm;
  std::size_t segment_bytes = 0;  // of the parts into which the largest message is cut
  double seconds = 0;
};

// Returns the fastest algorithm of the catalogue or, for small sums, one like "gather(direct)":
// that all_gather brings every rank's input to all ranks, and each adds them up. Among algorithms
// that differ by less than a hundredth, it takes the one that has the least to do by its closed
// form. Simulates a few segments and extrapolates; skips what its closed form puts far behind.
Choice choose(const CostModel& model, const Question& question);

}  // namespace gradwire::schedule
