// The catalogue of algorithms. A file per family emits edges for any number of ranks from 1 on.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gradwire/schedule/schedule.h"

namespace gradwire::schedule {

// A schedule to generate. Only hierarchical uses `groups`: the ranks of each host, each rank once.
struct Recipe {
  Collective collective = Collective::kAllReduce;
  std::string algorithm = "ring";  // or "hierarchical(inner,outer)"
  int ranks = 1;
  Rank root = 0;
  std::vector<std::vector<Rank>> groups;
};

// Returns the schedule. Throws ScheduleError for an algorithm that is unknown or that this
// collective does not have.
Schedule generate(const Recipe& recipe);

// Returns this collective's algorithms, best known first, without hierarchical.
std::vector<std::string_view> algorithms(Collective collective);

// Rounds, and the most that any rank sends, as a share of all chunks together (n; for all_to_all
// the blocks of all ranks).
struct ScheduleShape {
  int rounds = 0;
  double max_sent = 0;
};

// Returns the textbook's closed form, where there is one. verify and the tests compare with it.
std::optional<ScheduleShape> closed_form(const Recipe& recipe);

}  // namespace gradwire::schedule
