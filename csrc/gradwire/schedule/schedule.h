// An algorithm is data: a Schedule lists, round by round, the edges along which chunks move.
//
// Two sentences define it:
//   - Sends read the buffer as it was when the round began; landings happen after.
//   - Several reductions into one chunk fold in list order.
// So a copy lands alone: nothing else may land in that round on the same chunk of the same rank.
//
// Every edge is both a send and its receive, so a round can never hold one without the other. All
// edges of a round between the same two ranks, in list order, travel as one message.
//
// Chunks are numbered 0 … chunks-1 over the whole operation; what a chunk is depends on it:
//   all_reduce, reduce, broadcast   part c of the one buffer, cut evenly
//   reduce_scatter, scatter         the block that ends at rank c (chunks = ranks)
//   all_gather, gather              the block that starts at rank c (chunks = ranks)
//   all_to_all                      chunk s·ranks + d is the block that rank s has for rank d
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "gradwire/base/types.h"

namespace gradwire::schedule {

struct ChunkRange {
  int first = 0;
  int last = 0;  // one past the end
  int size() const noexcept { return last - first; }
  bool operator==(const ChunkRange&) const = default;
};

enum class Landing : std::uint8_t { kCopy, kReduce };

struct Edge {
  Rank src = 0;
  Rank dst = 0;
  ChunkRange chunks;
  Landing landing = Landing::kCopy;
  bool operator==(const Edge&) const = default;
};

using Round = std::vector<Edge>;

// A value type: it copies, compares and serialises.
struct Schedule {
  Collective collective = Collective::kAllReduce;
  std::string name;  // "ring", "hierarchical(ring,direct)", or the user's own
  int ranks = 1;
  int chunks = 1;
  Rank root = 0;  // of reduce, broadcast, gather, scatter; else 0
  std::vector<Round> rounds;

  bool operator==(const Schedule&) const = default;
};

// What a generator writes to. Naming a round creates it. An edge out of range throws ScheduleError
// that names the round and the ranks.
class Builder {
 public:
  Builder(int ranks, int chunks);

  int ranks() const noexcept { return schedule_.ranks; }
  int chunks() const noexcept { return schedule_.chunks; }
  int rounds() const noexcept { return static_cast<int>(schedule_.rounds.size()); }

  // src's chunks replace dst's.
  void copy(int round, Rank src, Rank dst, ChunkRange chunks);
  // src's chunks are added (or min-ed, …) into dst's.
  void reduce(int round, Rank src, Rank dst, ChunkRange chunks);

  Schedule build(Collective collective, std::string name, Rank root = 0) &&;

 private:
  void add(int round, Edge edge);
  Schedule schedule_;
};

// Each returns one rank's edges in one round, in list order.
std::vector<Edge> sends_of(const Round& round, Rank rank);
std::vector<Edge> receives_of(const Round& round, Rank rank);

// The text form; parse_schedule(to_text(s)) == s. Bad text throws ScheduleError that names the
// line.
//
//   gradwire schedule 1
//   all_reduce ring ranks=3 chunks=3 root=0
//   round 0
//     0 -> 1 reduce 2
//     1 -> 2 copy 0:2        (chunks 0 and 1)
//   # comments and blank lines are skipped
std::string to_text(const Schedule& schedule);
Schedule parse_schedule(std::string_view text);

// Returns FNV-1a of the text form without the name.
std::uint64_t digest(const Schedule& schedule);

// Returns `value` modulo `modulus`, which is never negative.
constexpr int wrap(int value, int modulus) noexcept {
  return ((value % modulus) + modulus) % modulus;
}

}  // namespace gradwire::schedule
