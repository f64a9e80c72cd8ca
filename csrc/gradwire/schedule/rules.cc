#include "gradwire/schedule/rules.h"

#include <algorithm>

#include "gradwire/base/error.h"

namespace gradwire::schedule {
namespace {

std::string out_of(const std::string& what, long long value, long long end) {
  return what + " " + std::to_string(value) + " is not in 0 .. " + std::to_string(end - 1);
}

bool within(int value, int end) { return value >= 0 && value < end; }

}  // namespace

bool rooted(Collective collective) noexcept {
  using enum Collective;
  return collective == kReduce || collective == kBroadcast || collective == kGather ||
         collective == kScatter;
}

int required_chunks(Collective collective, int ranks) noexcept {
  using enum Collective;
  if (collective == kAllToAll) return ranks * ranks;
  const bool blocks = collective == kReduceScatter || collective == kAllGather ||
                      collective == kGather || collective == kScatter;
  return blocks ? ranks : 0;
}

std::string fault_in_size(int ranks, int chunks) {
  if (!within(ranks - 1, kMaxRanks))
    return "ranks=" + std::to_string(ranks) + " is not in 1 .. " + std::to_string(kMaxRanks);
  if (!within(chunks - 1, kMaxChunks))
    return "chunks=" + std::to_string(chunks) + " is not in 1 .. " + std::to_string(kMaxChunks);
  return "";
}

std::string fault_in_name(std::string_view name) {
  const auto printable = [](char c) { return c > ' ' && c < '\x7f' && c != '#'; };
  if (!name.empty() && name.size() <= kMaxName && std::all_of(name.begin(), name.end(), printable))
    return "";
  return "a schedule's name is 1 to " + std::to_string(kMaxName) +
         " printable ASCII characters without blanks and '#'";
}

std::string fault_in_roles(const Schedule& s) {
  const std::string collective(name_of(s.collective));
  const int required = required_chunks(s.collective, s.ranks);
  if (required != 0 && s.chunks != required)
    return collective + " over " + std::to_string(s.ranks) + " ranks has " +
           std::to_string(required) + " chunks, not " + std::to_string(s.chunks);
  if (!rooted(s.collective) && s.root != 0)
    return collective + " has no root; leave root at 0, not " + std::to_string(s.root);
  return within(s.root, s.ranks) ? "" : out_of("root", s.root, s.ranks);
}

std::string fault_in_edge(const Schedule& s, int round, const Edge& edge) {
  if (!within(round, kMaxRounds)) return out_of("round", round, kMaxRounds);
  const std::string where = "round " + std::to_string(round) + ": edge " +
                            std::to_string(edge.src) + " -> " + std::to_string(edge.dst) + ": ";
  if (!within(edge.src, s.ranks)) return where + out_of("rank", edge.src, s.ranks);
  if (!within(edge.dst, s.ranks)) return where + out_of("rank", edge.dst, s.ranks);
  const ChunkRange c = edge.chunks;
  if (c.first < 0 || c.first >= c.last || c.last > s.chunks)
    return where + "chunks " + std::to_string(c.first) + ":" + std::to_string(c.last) +
           " are not a range within 0:" + std::to_string(s.chunks);
  return "";
}

void require_no_fault(const std::string& fault, const std::string& prefix) {
  if (!fault.empty()) throw ScheduleError(prefix + fault);
}

std::string to_string(ChunkRange chunks) {
  if (chunks.size() == 1) return "chunk " + std::to_string(chunks.first);
  return "chunks " + std::to_string(chunks.first) + ":" + std::to_string(chunks.last);
}

}  // namespace gradwire::schedule
