// Symbolic execution of a schedule: each chunk of each rank is the set of contributions it holds.
#pragma once

#include <string>
#include <vector>

#include "gradwire/schedule/generators.h"
#include "gradwire/schedule/schedule.h"

namespace gradwire::schedule {

// The six facts. `problems` names, in sentences, the round, ranks and chunks that break one.
struct Report {
  bool correct = false;        // each result holds each contribution exactly once
  bool complete = false;       // each rank that must end with a result has one, nothing missing
  bool deadlock_free = false;  // no rank waits for itself, directly or around a cycle
  bool agreement = false;      // all ranks end with equal bits: the same tree of additions
  bool in_tree = false;        // ok(); partials go once, to one parent; only results are copied
  ScheduleShape shape;         // counted on the edges
  std::vector<std::string> problems;

  // Returns whether the schedule can be run: the first four facts hold.
  bool ok() const noexcept { return correct && complete && deadlock_free && agreement; }
};

Report verify(const Schedule& schedule);

// Throws ScheduleError with the first problems unless verify(schedule).ok().
void require_valid(const Schedule& schedule);

}  // namespace gradwire::schedule
