#include "gradwire/exec/plan/wide_folds.h"

#include <algorithm>

namespace gradwire::exec {
namespace {

// Returns whether addends of these two rounds belong to different sums. Sends read a chunk before
// the addends of their round arrive.
bool are_apart(const ChunkRounds& rounds, int before, int after) {
  return std::ranges::any_of(rounds.sent,
                             [=](int round) { return before < round && round <= after; }) ||
         std::ranges::any_of(rounds.replaced,
                             [=](int round) { return before <= round && round <= after; });
}

}  // namespace

std::vector<WideFold> wide_folds(const ChunkRounds& rounds, bool averages) {
  std::vector<WideFold> folds(rounds.added.size());
  if (folds.empty()) return folds;
  for (std::size_t k = 1; k < folds.size(); ++k)
    folds[k].begins = folds[k - 1].ends = are_apart(rounds, rounds.added[k - 1], rounds.added[k]);
  folds.front().begins = folds.back().ends = true;
  folds.back().averages = averages;
  for (WideFold& fold : folds) {  // a single addend is rounded once anyway, unless it is averaged
    const bool single = fold.begins && fold.ends;
    if (!single || fold.averages) fold.place = 0;
  }
  return folds;
}

std::uint32_t WidePlaces::take() {
  if (unused_.empty()) return most_++;
  const std::uint32_t place = unused_.back();
  unused_.pop_back();
  return place;
}

}  // namespace gradwire::exec
