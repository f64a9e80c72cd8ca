#include "gradwire/schedule/verify.h"

#include <algorithm>
#include <map>
#include <set>

#include "gradwire/base/error.h"
#include "gradwire/schedule/chunk_class.h"
#include "gradwire/schedule/rules.h"

namespace gradwire::schedule {
namespace {

// Checks what must hold before the edges can be followed at all.
std::string structural_fault(const Schedule& s) {
  if (std::string fault = fault_in_size(s.ranks, s.chunks); !fault.empty()) return fault;
  if (std::string fault = fault_in_roles(s); !fault.empty()) return fault;
  if (s.rounds.size() > kMaxRounds) return "more than " + std::to_string(kMaxRounds) + " rounds";
  for (std::size_t round = 0; round < s.rounds.size(); ++round)
    for (const Edge& edge : s.rounds[round])
      if (std::string fault = fault_in_edge(s, static_cast<int>(round), edge); !fault.empty())
        return fault;
  return "";
}

ScheduleShape shape_of(const Schedule& s) {
  std::vector<long long> sent(at(s.ranks));
  for (const Round& round : s.rounds)
    for (const Edge& edge : round) sent[at(edge.src)] += edge.chunks.size();
  const long long most = *std::max_element(sent.begin(), sent.end());
  return {static_cast<int>(s.rounds.size()), static_cast<double>(most) / s.chunks};
}

// Returns the chunks at which classes begin: wherever an edge or the role of a chunk changes.
std::vector<int> class_bounds(const Schedule& s) {
  std::vector<int> bounds = {0, s.chunks};
  if (required_chunks(s.collective, s.ranks) != 0)
    for (int chunk = 1; chunk < s.chunks; ++chunk) bounds.push_back(chunk);
  for (const Round& round : s.rounds)
    for (const Edge& edge : round)
      bounds.insert(bounds.end(), {edge.chunks.first, edge.chunks.last});
  std::sort(bounds.begin(), bounds.end());
  bounds.erase(std::unique(bounds.begin(), bounds.end()), bounds.end());
  return bounds;
}

// Returns all edges, sorted by first chunk and then in list order.
std::vector<EdgeStep> steps_by_chunk(const Schedule& s) {
  std::vector<EdgeStep> steps;
  for (std::size_t round = 0; round < s.rounds.size(); ++round)
    for (const Edge& edge : s.rounds[round]) steps.push_back({static_cast<int>(round), &edge});
  std::stable_sort(steps.begin(), steps.end(), [](const EdgeStep& a, const EdgeStep& b) {
    return a.edge->chunks.first < b.edge->chunks.first;
  });
  return steps;
}

// Returns whether a comes first in list order, which within one round is the order in memory.
bool before(const EdgeStep& a, const EdgeStep& b) {
  return a.round != b.round ? a.round < b.round : a.edge < b.edge;
}

// Executes every chunk class, first to last, with the edges that touch it.
void run_chunk_classes(const Schedule& s, Findings& findings) {
  const std::vector<EdgeStep> steps = steps_by_chunk(s);
  const std::vector<int> bounds = class_bounds(s);
  ChunkClass chunks(s, findings);
  std::vector<EdgeStep> active;
  auto next = steps.begin();
  for (std::size_t i = 0; i + 1 < bounds.size(); ++i) {
    const int begin = bounds[i];
    std::erase_if(active,
                  [begin](const EdgeStep& step) { return step.edge->chunks.last <= begin; });
    const auto kept = static_cast<std::ptrdiff_t>(active.size());
    while (next != steps.end() && next->edge->chunks.first == begin) active.push_back(*next++);
    std::inplace_merge(active.begin(), active.begin() + kept, active.end(), before);
    chunks.run({begin, bounds[i + 1]}, active);
  }
}

// Rounds come in one order for all ranks and an edge is both of its ends, so a rank waits only for
// ranks that are in an earlier round, or that have sent everything of its own round. So the only
// deadlock left is a rank that waits for itself.
void find_deadlocks(const Schedule& s, Findings& findings) {
  for (std::size_t round = 0; round < s.rounds.size(); ++round)
    for (const Edge& edge : s.rounds[round])
      if (edge.src == edge.dst)
        findings.deadlock([&, round] {
          return "round " + std::to_string(round) + ": rank " + std::to_string(edge.src) +
                 " sends " + to_string(edge.chunks) + " to itself";
        });
}

bool overlap(ChunkRange a, ChunkRange b) { return a.first < b.last && b.first < a.last; }

// Returns whether `late`, an edge into the same chunk that is listed after `early`, lands first.
// Messages land in the order of their first edges.
bool lands_out_of_order(const std::vector<const Edge*>& into, std::size_t early, std::size_t late) {
  const auto message = [&](std::size_t edge) {
    return std::find_if(into.begin(), into.end(),
                        [&](const Edge* each) { return each->src == into[edge]->src; });
  };
  return overlap(into[early]->chunks, into[late]->chunks) && message(late) < message(early);
}

void compare_orders(int round, const std::vector<const Edge*>& into, Findings& findings) {
  for (std::size_t late = 1; late < into.size(); ++late)
    for (std::size_t early = 0; early < late; ++early)
      if (lands_out_of_order(into, early, late))
        findings.disagreement([&] {
          return "round " + std::to_string(round) + ": the edges " +
                 std::to_string(into[late]->src) + " -> " + std::to_string(into[late]->dst) +
                 " travel as one message, which lands before " + to_string(into[early]->chunks) +
                 " from rank " + std::to_string(into[early]->src) + "; list them together";
        });
}

// Edges of a round between the same two ranks travel as one message, so that message must land
// where list order says.
void find_interleaved_messages(const Schedule& s, Findings& findings) {
  for (std::size_t round = 0; round < s.rounds.size(); ++round) {
    std::map<Rank, std::vector<const Edge*>> into;
    std::set<std::pair<Rank, Rank>> seen;
    std::set<Rank> suspects;  // destinations with several edges from one source
    for (const Edge& edge : s.rounds[round]) {
      if (edge.landing != Landing::kReduce) continue;
      into[edge.dst].push_back(&edge);
      if (!seen.insert({edge.src, edge.dst}).second) suspects.insert(edge.dst);
    }
    for (Rank dst : suspects) compare_orders(static_cast<int>(round), into[dst], findings);
  }
}

}  // namespace

Report verify(const Schedule& schedule) {
  Report report;
  if (std::string fault = structural_fault(schedule); !fault.empty()) {
    report.problems.push_back(std::move(fault));
    return report;
  }
  report.correct = report.complete = report.deadlock_free = report.agreement = report.in_tree =
      true;
  report.shape = shape_of(schedule);
  Findings findings(report);
  find_deadlocks(schedule, findings);
  find_interleaved_messages(schedule, findings);
  run_chunk_classes(schedule, findings);
  report.in_tree = report.in_tree && report.ok();
  return report;
}

void require_valid(const Schedule& schedule) {
  const Report report = verify(schedule);
  if (report.ok()) return;
  constexpr std::size_t kShown = 3;
  std::string message = "schedule '" + schedule.name + "' is not a valid " +
                        std::string(name_of(schedule.collective)) + " over " +
                        std::to_string(schedule.ranks) + " ranks: ";
  for (std::size_t i = 0; i < std::min(kShown, report.problems.size()); ++i)
    message += (i > 0 ? "; " : "") + report.problems[i];
  if (report.problems.size() > kShown) message += "; and more (verify lists them)";
  throw ScheduleError(message);
}

}  // namespace gradwire::schedule
