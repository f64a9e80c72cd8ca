#include "gradwire/schedule/schedule.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "gradwire/base/error.h"
#include "gradwire/schedule/rules.h"

namespace gradwire::schedule {

Builder::Builder(int ranks, int chunks) {
  require_no_fault(fault_in_size(ranks, chunks));
  schedule_.ranks = ranks;
  schedule_.chunks = chunks;
}

void Builder::copy(int round, Rank src, Rank dst, ChunkRange chunks) {
  add(round, {src, dst, chunks, Landing::kCopy});
}

void Builder::reduce(int round, Rank src, Rank dst, ChunkRange chunks) {
  add(round, {src, dst, chunks, Landing::kReduce});
}

void Builder::add(int round, Edge edge) {
  require_no_fault(fault_in_edge(schedule_, round, edge));
  const auto index = static_cast<std::size_t>(round);
  if (index >= schedule_.rounds.size()) schedule_.rounds.resize(index + 1);
  schedule_.rounds[index].push_back(edge);
}

Schedule Builder::build(Collective collective, std::string name, Rank root) && {
  require_no_fault(fault_in_name(name));
  schedule_.collective = collective;
  schedule_.name = std::move(name);
  schedule_.root = root;
  require_no_fault(fault_in_roles(schedule_), schedule_.name + ": ");
  return std::move(schedule_);
}

Schedule then(Schedule first, const Schedule& second, Collective collective, std::string name) {
  if (first.ranks != second.ranks || first.chunks != second.chunks)
    throw ScheduleError("then: " + first.name + " has ranks=" + std::to_string(first.ranks) +
                        " chunks=" + std::to_string(first.chunks) + ", but " + second.name +
                        " has ranks=" + std::to_string(second.ranks) +
                        " chunks=" + std::to_string(second.chunks));
  if (first.rounds.size() + second.rounds.size() > kMaxRounds)
    throw ScheduleError("then: more than " + std::to_string(kMaxRounds) + " rounds");
  require_no_fault(fault_in_name(name));
  first.collective = collective;
  first.name = std::move(name);
  first.root = rooted(collective) ? first.root : 0;
  first.rounds.insert(first.rounds.end(), second.rounds.begin(), second.rounds.end());
  require_no_fault(fault_in_roles(first), first.name + ": ");
  return first;
}

std::vector<Edge> sends_of(const Round& round, Rank rank) {
  std::vector<Edge> mine;
  std::copy_if(round.begin(), round.end(), std::back_inserter(mine),
               [rank](const Edge& edge) { return edge.src == rank; });
  return mine;
}

std::vector<Edge> receives_of(const Round& round, Rank rank) {
  std::vector<Edge> mine;
  std::copy_if(round.begin(), round.end(), std::back_inserter(mine),
               [rank](const Edge& edge) { return edge.dst == rank; });
  return mine;
}

}  // namespace gradwire::schedule
