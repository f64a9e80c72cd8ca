#include "gradwire/schedule/generators.h"

#include <gtest/gtest.h>

#include "gradwire/base/error.h"
#include "schedule_catalogue.h"

namespace gradwire::schedule {
namespace schedule_generators_test {

TEST(Generators, EveryRecipeVerifies) {
  for (const Recipe& recipe : all_recipes()) {
    const Report report = verify(generate(recipe));
    EXPECT_TRUE(report.ok()) << label(recipe) << problems_of(report);
    EXPECT_TRUE(report.problems.empty()) << label(recipe) << problems_of(report);
  }
}

TEST(Generators, EveryRecipeHasTheShapeOfItsClosedForm) {
  for (const Recipe& recipe : all_recipes()) {
    const ScheduleShape counted = verify(generate(recipe)).shape;
    const auto textbook = closed_form(recipe);
    ASSERT_TRUE(textbook) << label(recipe);
    EXPECT_EQ(counted.rounds, textbook->rounds) << label(recipe);
    EXPECT_NEAR(counted.max_sent, textbook->max_sent, 1e-12) << label(recipe);
  }
}

// The closed forms themselves, in figures from the papers.
TEST(Generators, ClosedFormsAreTheTextbooks) {
  const auto form = [](std::string_view algorithm, int p) {
    return *closed_form(recipe_of(Collective::kAllReduce, algorithm, p));
  };
  EXPECT_EQ(form("ring", 8).rounds, 14);
  EXPECT_DOUBLE_EQ(form("ring", 8).max_sent, 1.75);
  EXPECT_EQ(form("halving_doubling", 8).rounds, 6);
  EXPECT_DOUBLE_EQ(form("halving_doubling", 8).max_sent, 1.75);
  EXPECT_EQ(form("recursive_doubling", 8).rounds, 3);
  EXPECT_DOUBLE_EQ(form("recursive_doubling", 8).max_sent, 3);
  EXPECT_EQ(form("direct", 8).rounds, 2);
  EXPECT_DOUBLE_EQ(form("direct", 8).max_sent, 1.75);
  EXPECT_DOUBLE_EQ(form("star", 8).max_sent, 7);
  EXPECT_DOUBLE_EQ(form("binary_tree", 8).max_sent, 3);
  EXPECT_DOUBLE_EQ(form("double_binary_tree", 8).max_sent, 2);
}

TEST(Generators, AllButRecursiveDoublingAreInTrees) {
  for (const Recipe& recipe : all_recipes()) {
    const bool owned = recipe.algorithm != "recursive_doubling" || recipe.ranks == 1;
    EXPECT_EQ(verify(generate(recipe)).in_tree, owned) << label(recipe);
  }
}

TEST(Generators, OneRankNeedsNoRound) {
  for (const Recipe& recipe : all_recipes(1))
    EXPECT_TRUE(generate(recipe).rounds.empty()) << label(recipe);
}

TEST(Generators, NoRoundIsEmpty) {
  for (const Recipe& recipe : all_recipes())
    for (const Round& round : generate(recipe).rounds) EXPECT_FALSE(round.empty()) << label(recipe);
}

TEST(Generators, NoRankOfADoubleBinaryTreeSendsMoreThanTwiceTheBuffer) {
  for (int p = 1; p <= 130; ++p)
    EXPECT_LE(verify(all_reduce_by("double_binary_tree", p)).shape.max_sent, 2.0) << p;
}

TEST(Generators, NoRankIsInsideBothTrees) {
  for (int p = 2; p <= 130; ++p) {
    std::vector<std::set<Rank>> parents(2);
    const Schedule s = generate(recipe_of(Collective::kBroadcast, "double_binary_tree", p, p / 3));
    for (const Round& round : s.rounds)
      for (const Edge& edge : round)
        if (edge.src != s.root)
          parents[static_cast<std::size_t>(edge.chunks.first)].insert(edge.src);
    for (Rank r : parents[0]) EXPECT_FALSE(parents[1].contains(r)) << "p=" << p << " rank " << r;
  }
}

TEST(Generators, ScheduleCarriesItsRecipe) {
  const Schedule s = generate(recipe_of(Collective::kBroadcast, "binary_tree", 5, 3));
  EXPECT_EQ(s.collective, Collective::kBroadcast);
  EXPECT_EQ(s.name, "binary_tree");
  EXPECT_EQ(s.ranks, 5);
  EXPECT_EQ(s.root, 3);
}

std::string error_of(const Recipe& recipe) {
  try {
    generate(recipe);
  } catch (const ScheduleError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Generators, UnknownAlgorithmListsTheKnown) {
  EXPECT_EQ(error_of(recipe_of(Collective::kAllGather, "star", 4)),
            "all_gather has no algorithm 'star'; use one of: ring, halving_doubling, direct");
  EXPECT_NE(
      error_of(recipe_of(Collective::kAllReduce, "rings", 4)).find("hierarchical(inner,outer)"),
      std::string::npos);
}

TEST(Generators, RanksAndRootsOutOfRangeAreRefused) {
  for (int ranks : {0, -1, 1 << 20})
    EXPECT_NE(error_of(recipe_of(Collective::kAllReduce, "ring", ranks)).find("ranks="),
              std::string::npos);
  for (Rank root : {-1, 4, 1 << 30})
    for (std::string_view algorithm : algorithms(Collective::kReduce))
      EXPECT_NE(error_of(recipe_of(Collective::kReduce, algorithm, 4, root)).find("root"),
                std::string::npos);
  EXPECT_NE(error_of(recipe_of(Collective::kAllReduce, "ring", 4, 1)).find("no root"),
            std::string::npos);
}

TEST(Generators, UnknownRecipesHaveNoClosedForm) {
  EXPECT_FALSE(closed_form(recipe_of(Collective::kAllReduce, "hierarchical(ring,ring)", 4)));
  EXPECT_FALSE(closed_form(recipe_of(Collective::kGather, "ring", 4)));
}

}  // namespace schedule_generators_test
}  // namespace gradwire::schedule
