// Hierarchical: reduce inside each group, all_reduce between groups, distribute inside each group.
//   groups of one size:  inner reduce half | outer over each chunk's owners | inner gather half
//   other groups:        binary_tree to a leader | outer over the leaders   | binary_tree down
// With two rings it is Cho et al. 2019 (BlueConnect), on two levels.
#include <algorithm>
#include <set>

#include "gradwire/base/error.h"
#include "gradwire/schedule/families.h"

namespace gradwire::schedule {
namespace {

using Group = std::vector<Rank>;

// Where a schedule over few ranks and chunks goes in a larger one: rank i becomes ranks[i], and
// chunk c becomes the `scale` chunks from offset + c · scale on.
struct Placement {
  int first_round = 0;
  Group ranks;
  int scale = 1;
  int offset = 0;
};

void place(Builder& out, const Schedule& part, const Placement& where) {
  for (std::size_t k = 0; k < part.rounds.size(); ++k) {
    const int round = where.first_round + static_cast<int>(k);
    for (const Edge& edge : part.rounds[k]) {
      const Rank src = where.ranks[at(edge.src)];
      const Rank dst = where.ranks[at(edge.dst)];
      const ChunkRange chunks{where.offset + edge.chunks.first * where.scale,
                              where.offset + edge.chunks.last * where.scale};
      edge.landing == Landing::kCopy ? out.copy(round, src, dst, chunks)
                                     : out.reduce(round, src, dst, chunks);
    }
  }
}

int size_of(const Group& group) { return static_cast<int>(group.size()); }

void place_in_groups(Builder& out, const Variant& inner, Emit half,
                     const std::vector<Group>& groups) {
  const int begin = out.rounds();
  const int parts = inner.chunks(size_of(groups[0]));
  for (const Group& group : groups) {
    Builder local(size_of(group), parts);
    half(local, 0);
    place(out, std::move(local).build(Collective::kAllReduce, "half"),
          {begin, group, out.chunks() / parts, 0});
  }
}

// Places `outer` between groups: part c of the buffer has one owner in each group, and `outer` sums
// it over these owners.
void place_between_groups(Builder& out, const Variant& inner, const Schedule& outer,
                          const std::vector<Group>& groups) {
  const int begin = out.rounds();
  for (int part = 0; part < inner.chunks(size_of(groups[0])); ++part) {
    Group owners;
    for (const Group& group : groups)
      owners.push_back(group[at(inner.owner(part, size_of(group)))]);
    place(out, outer, {begin, owners, 1, part * outer.chunks});
  }
}

void require_partition(const std::vector<Group>& groups, int ranks) {
  std::set<Rank> seen;
  std::size_t listed = 0;
  for (const Group& group : groups) {
    if (group.empty()) throw ScheduleError("hierarchical: a group is empty");
    seen.insert(group.begin(), group.end());
    listed += group.size();
  }
  const auto p = at(ranks);
  if (listed != p || seen.size() != p || *seen.begin() != 0 || *seen.rbegin() != ranks - 1)
    throw ScheduleError("hierarchical: groups must list every rank 0 .. " +
                        std::to_string(ranks - 1) + " once, one group per host");
}

// Returns the variant inside groups. Groups whose halves cut the buffer differently can meet only
// where one leader owns the whole buffer.
const Variant& inner_variant(std::string_view name, const std::vector<Group>& groups) {
  const Variant& inner = variant_of(Collective::kAllReduce, name);
  if (inner.gather == nullptr)
    throw ScheduleError("hierarchical: " + std::string(name) +
                        " has no reduce and gather halves, so it can only be the outer algorithm");
  const int parts = inner.chunks(size_of(groups[0]));
  const bool alike = std::all_of(groups.begin(), groups.end(), [&](const Group& group) {
    return inner.chunks(size_of(group)) == parts;
  });
  return alike ? inner : variant_of(Collective::kAllReduce, "binary_tree");
}

}  // namespace

Schedule hierarchical(const Recipe& recipe, std::string_view inner_name,
                      std::string_view outer_name) {
  require_partition(recipe.groups, recipe.ranks);
  const auto& groups = recipe.groups;
  const Variant& inner = inner_variant(inner_name, groups);
  const Schedule outer = instantiate(variant_of(Collective::kAllReduce, outer_name),
                                     static_cast<int>(groups.size()), 0);
  Builder out(recipe.ranks, inner.chunks(size_of(groups[0])) * outer.chunks);
  place_in_groups(out, inner, inner.emit, groups);
  place_between_groups(out, inner, outer, groups);
  place_in_groups(out, inner, inner.gather, groups);
  return std::move(out).build(Collective::kAllReduce, "hierarchical(" + std::string(inner_name) +
                                                          "," + std::string(outer_name) + ")");
}

}  // namespace gradwire::schedule
