// Every recipe that the suites run over: all collectives, their algorithms, p = 1 … 17, some roots.
#pragma once

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "gradwire/schedule/generators.h"
#include "gradwire/schedule/verify.h"

namespace gradwire::schedule {

inline constexpr int kMostRanks = 17;

inline Recipe recipe_of(Collective collective, std::string_view algorithm, int ranks,
                        Rank root = 0) {
  return {collective, std::string(algorithm), ranks, root, {}};
}

inline Schedule all_reduce_by(std::string_view algorithm, int ranks) {
  return generate(recipe_of(Collective::kAllReduce, algorithm, ranks));
}

inline std::string label(const Recipe& recipe) {
  return std::string(name_of(recipe.collective)) + " by " + recipe.algorithm +
         " p=" + std::to_string(recipe.ranks) + " root=" + std::to_string(recipe.root);
}

inline std::set<Rank> roots_of(Collective collective, int ranks) {
  const bool rooted = collective == Collective::kReduce || collective == Collective::kBroadcast ||
                      collective == Collective::kGather || collective == Collective::kScatter;
  if (!rooted) return {0};
  return {0, ranks / 2, ranks - 1};
}

inline std::vector<Recipe> all_recipes(int most_ranks = kMostRanks) {
  std::vector<Recipe> recipes;
  for (int c = 0; c < kCollectives; ++c) {
    const auto collective = static_cast<Collective>(c);
    for (std::string_view algorithm : algorithms(collective))
      for (int p = 1; p <= most_ranks; ++p)
        for (Rank root : roots_of(collective, p))
          recipes.push_back(recipe_of(collective, algorithm, p, root));
  }
  return recipes;
}

inline std::string problems_of(const Report& report) {
  std::string text;
  for (const std::string& problem : report.problems) text += "\n  " + problem;
  return text;
}

}  // namespace gradwire::schedule
