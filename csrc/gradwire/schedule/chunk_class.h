// A chunk class: consecutive chunks that all edges treat alike. verify() executes one at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "gradwire/schedule/verify.h"

namespace gradwire::schedule {

// An edge and the round that it is in.
struct EdgeStep {
  int round;
  const Edge* edge;
};

// Writes to a report which facts fail, with the first sentences that say why. A sentence is made on
// demand: `why` is called only while there is room for it.
class Findings {
 public:
  explicit Findings(Report& report) : report_(report) {}

  void incorrect(const auto& why) { fail(report_.correct, why); }
  void deadlock(const auto& why) { fail(report_.deadlock_free, why); }
  void disagreement(const auto& why) { fail(report_.agreement, why); }
  void incomplete(const auto& why) {
    report_.complete = false;
    incorrect(why);
  }
  void not_in_tree() { report_.in_tree = false; }

 private:
  static constexpr std::size_t kMaxProblems = 16;

  void fail(bool& fact, const auto& why) {
    fact = false;
    auto& problems = report_.problems;
    if (problems.size() >= kMaxProblems) return;
    std::string sentence = why();
    if (std::find(problems.begin(), problems.end(), sentence) == problems.end())
      problems.push_back(std::move(sentence));
  }

  Report& report_;
};

// Sums of contributions, each stored once: two sums have the same Id exactly when they are the same
// tree of additions, up to the order of two operands (IEEE addition commutes, but does not
// associate).
class Sums {
 public:
  using Id = int;

  // Where a contribution was first counted twice; `step` is null where none was.
  struct Repetition {
    const EdgeStep* step = nullptr;
    Rank rank = 0;
  };

  explicit Sums(int ranks);

  static Id contribution(Rank rank) { return rank; }
  // Returns the sum of a and b. `step` is to blame if a contribution is in both; it must outlive
  // the sum.
  Id add(Id a, Id b, const EdgeStep& step);

  // Returns whether the sum counts every rank, once or more.
  bool complete(Id sum) const;
  std::vector<Rank> missing(Id sum) const;
  Repetition repetition(Id sum) const { return repetitions_[at(sum)]; }
  // Forgets everything but the contributions themselves.
  void reset();

 private:
  const std::uint64_t* counted(Id sum) const { return counted_.data() + at(sum) * words_; }
  Repetition repeated_in(Id a, Id b, const EdgeStep& step) const;

  int ranks_;
  std::size_t words_;                    // 64-bit words in a set of ranks
  std::vector<std::uint64_t> counted_;   // the set of ranks in each sum, words_ long
  std::vector<Repetition> repetitions_;  // one for each sum
  std::unordered_map<std::uint64_t, Id> made_;
};

class ChunkClass {
 public:
  ChunkClass(const Schedule& schedule, Findings& findings);

  // Executes `steps`, which must be in list order, on `chunks`, and reports what is wrong.
  void run(ChunkRange chunks, std::span<const EdgeStep> steps);

 private:
  static constexpr Sums::Id kNothing = -1;

  struct HeldValue {
    Sums::Id held = kNothing;
    int reductions_sent = 0;
    int landed_in = -1;   // the last round in which an edge landed here
    bool copied = false;  // whether an edge of that round was a copy
  };

  void begin(ChunkRange chunks);
  void run_round(std::span<const EdgeStep> steps);
  void land(const EdgeStep& step, Sums::Id value);
  bool collides(const EdgeStep& step);
  void check_end();
  void check_rank(Rank rank, Sums::Id held);
  void check_in_tree();

  bool starts_at(Rank rank) const;
  bool ends_at(Rank rank) const;
  // "round 2: rank 3 reduces chunk 1 from rank 0"
  std::string describe(const EdgeStep& step) const;
  HeldValue& state(Rank rank) { return states_[at(rank)]; }

  const Schedule& schedule_;
  Findings& findings_;
  Sums sums_;
  ChunkRange chunks_;
  std::vector<HeldValue> states_;  // one for each rank
  std::vector<Sums::Id> sent_;     // one for each edge of the round
};

}  // namespace gradwire::schedule
