// The catalogue of algorithms: each family is a file, and emits edges for any ranks >= 1.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gradwire/schedule/schedule.h"

namespace gradwire::schedule {

// A schedule to generate. `groups` is for hierarchical alone: the ranks of each host, each once.
struct Recipe {
  Collective collective = Collective::kAllReduce;
  std::string algorithm = "ring";  // or "hierarchical(inner,outer)"
  int ranks = 1;
  Rank root = 0;
  std::vector<std::vector<Rank>> groups;
};

// Throws ScheduleError for an algorithm that is unknown, or that this collective does not have.
Schedule generate(const Recipe& recipe);

// The algorithms that this collective has, best known first, without hierarchical.
std::vector<std::string_view> algorithms(Collective collective);

// Rounds, and the most that any rank sends, in units of all chunks together (n; for all_to_all that
// is the blocks of all ranks).
struct Shape {
  int rounds = 0;
  double max_sent = 0;
};

// The textbook's closed form, where there is one, for verify and the tests to compare with.
std::optional<Shape> closed_form(const Recipe& recipe);

}  // namespace gradwire::schedule
