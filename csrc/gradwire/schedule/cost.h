// The cost model, and what it is for: a simulator, which is one more reader of a Schedule, and the
// choice of an algorithm by it.
//
// simulate() runs a schedule's frames on clocks. A rank is a processor that does one thing at a
// time: it stages what it may send and lands what has arrived, by turns, both in the order of
// exec/plan/plan.h and under its two conditions. A message of w wire bytes to k peers takes
//
//     at the sender      what the codec takes, once, and alpha + copy·w for each peer
//     on the way         beta·w on the NIC of the sender, latency, beta·w on the receiver's NIC:
//                        a NIC does one message at a time, in each direction; bits pass through
//     at the receiver    alpha + copy·w, and what the codec takes to land it
//
// Within a host each rank has a NIC of its own (beta is 0, unless links are emulated); between
// hosts all ranks of a host share one.
//
// Where a host has more ranks than cores, each core has its ranks, of which one works until it must
// wait, and gives way. Who waits has the core in turns, each of which takes `turn` whether there is
// something to do or not. There calls are looked at that follow each other: a rank goes on with the
// next one while it has the core.
//
// Every machine computes the same bits: doubles, a fixed order, nothing fused. All ranks of a
// communicator have one model, so they choose alike.
#pragma once

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

#include "gradwire/base/wire.h"
#include "gradwire/schedule/generators.h"
#include "gradwire/schedule/schedule.h"

namespace gradwire::schedule {

// Seconds; those of a byte are of a wire byte.
struct LinkCost {
  double alpha = 0;    // of a processor, for a message, at each end
  double latency = 0;  // from staged to seen, in which nobody works
  double beta = 0;     // of a NIC, for a byte, at each end
  double copy = 0;     // of a processor, for a byte, at each end: what the kernel moves
};

// Seconds of a processor for a byte of the caller's array.
struct CodecCost {
  double encode = 0;
  double decode = 0;
};

struct CostModel {
  LinkCost within;   // pairs of ranks on one host
  LinkCost between;  // all other pairs
  double call = 0;   // seconds of a call, however small
  double move = 0;   // seconds of a processor for a byte that is copied to staging or from it
  double gamma = 0;  // seconds of a processor for a byte that is added from staging
  double turn = 0;   // seconds until another rank runs on a core
  int cores = 1;     // of each host
  // The cost of far memory: seconds of a processor per byte grow by these factors for calls
  // of 512 KiB, 4 and 32 MiB a rank, evenly from octave to octave, and from 64 KiB, where they
  // are 1.
  std::array<double, 3> far{1, 1, 1};
  std::map<std::string, CodecCost> codecs;  // by name, without parameters

  const CodecCost& codec(std::string_view name) const;  // "topk:density=0.01"; else kAnyCodec's

  // The parameters as flat names: "within.alpha", "far.4M", "fp16.encode". set() throws
  // InvalidArgument for another name, and for what is no finite value, not negative, below 1000 (a
  // million for cores, a whole number from 1).
  std::vector<std::pair<std::string, double>> parameters() const;
  void set(const std::string& name, double value);
  std::uint64_t digest() const;  // of all of these; never 0

  double growth(double bytes) const;  // far, for a call of so many bytes
};

// Sensible values for pairs on one host and for others, by the names of their transports, and for
// a codec of which nothing is known.
CostModel default_model(std::string_view within, std::string_view between, int cores);

inline constexpr const char* kAnyCodec = "any";  // which has no costs of its own
inline constexpr double kHeaderBytes = 32;       // of each frame, on the wire

// The call for which a schedule is simulated.
struct Workload {
  std::vector<double> chunks;  // bytes of each, in the caller's arrays
  int segments = 1;
  std::vector<int> host_of = {};        // by rank; empty: all on one
  std::optional<CodecCost> codec = {};  // of a lossy codec
  double ratio = 1;                     // wire bytes for a byte of the array
};

double total_bytes(const Workload& work);

// Seconds until the last rank is through, or, of ranks that share cores, of a call among others;
// infinity as soon as that is more than `limit`.
double simulate(const Schedule& schedule, const CostModel& model, const Workload& work,
                double limit = std::numeric_limits<double>::infinity());

// The call for which to choose. The bytes are those of all chunks together.
struct Question {
  Collective collective = Collective::kAllReduce;
  int ranks = 1;
  Rank root = 0;
  double bytes = 0;
  std::vector<std::vector<Rank>> hosts = {};  // ranks of each; empty: one host
  std::optional<CodecCost> codec = {};        // of a lossy one: the schedule is in-tree then
  double ratio = 1;
  double most_message = kUsualFrame;  // bytes that a frame may have
};

// Seconds of a call by a schedule of the caller's choice, in the segments that exec/plan/plan.h
// cuts then.
double predict(const CostModel& model, const Schedule& schedule, const Question& question);
// The same of a sum of so many bytes whose inputs all ranks get by an all_gather.
double predict_gathered(const CostModel& model, const Schedule& all_gather,
                        const Question& question);

struct Choice {
  std::string algorithm;
  std::size_t segment_bytes = 0;  // of the largest message: into such parts it is cut
  double seconds = 0;
};

// The fastest of the catalogue, or for small sums one like "gather(direct)": every rank's input
// goes to all by that all_gather, and each adds them up. Of those that differ by less than a
// hundredth, the one with the least to do by a closed form. Segments are simulated in small numbers
// and extrapolated, and what a closed form puts far behind is not simulated.
Choice choose(const CostModel& model, const Question& question);

}  // namespace gradwire::schedule
