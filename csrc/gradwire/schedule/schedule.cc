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
  const auto index = at(round);
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

namespace {

std::vector<Edge> edges_at(const Round& round, Rank Edge::* end, Rank rank) {
  std::vector<Edge> found;
  std::ranges::copy_if(round, std::back_inserter(found),
                       [&](const Edge& edge) { return edge.*end == rank; });
  return found;
}

}  // namespace

std::vector<Edge> sends_of(const Round& round, Rank rank) {
  return edges_at(round, &Edge::src, rank);
}

std::vector<Edge> receives_of(const Round& round, Rank rank) {
  return edges_at(round, &Edge::dst, rank);
}

}  // namespace gradwire::schedule
