// What each family of algorithms hands to the catalogue (generators.cc). A new family is a file, a
// declaration at the end of this one, and a line in the catalogue.
#pragma once

#include <span>
#include <string_view>

#include "gradwire/schedule/generators.h"
#include "gradwire/schedule/schedule.h"

namespace gradwire::schedule {

// Appends rounds after those that `out` already has. `root` is 0 where the collective has none.
using Emit = void (*)(Builder& out, Rank root);

// One collective by one algorithm.
//
// Reduce edges carry partial sums and copy edges finished values; recursive doubling, where all
// edges are reductions but every rank finishes, is the one exception (Report::in_tree).
struct Variant {
  Collective collective;
  std::string_view algorithm;
  int (*chunks)(int ranks);
  Emit emit;
  ScheduleShape (*closed_form)(int ranks);

  // Both are set for an all_reduce in two halves: `emit` ends where rank owner(c) holds the
  // finished chunk c, and `gather` continues from there. Hierarchical puts its outer rounds in
  // between.
  Emit gather = nullptr;
  Rank (*owner)(int chunk, int ranks) = nullptr;
};

// Returns the variant. An unknown one throws ScheduleError that lists the collective's algorithms.
const Variant& variant_of(Collective collective, std::string_view algorithm);

// Returns the whole collective, with both halves where there are two. `root` must be a rank.
Schedule instantiate(const Variant& variant, int ranks, Rank root);

// Returns `inner` within each of recipe.groups, and `outer` between them.
Schedule hierarchical(const Recipe& recipe, std::string_view inner, std::string_view outer);

inline int one_chunk(int) noexcept { return 1; }
inline int chunk_per_rank(int ranks) noexcept { return ranks; }
// Returns the share (p-1)/p: all but one of p equal chunks.
inline double all_but_one(int ranks) noexcept { return (ranks - 1.0) / ranks; }

std::span<const Variant> ring_family();
std::span<const Variant> butterfly_family();
std::span<const Variant> tree_family();
std::span<const Variant> direct_family();

}  // namespace gradwire::schedule
