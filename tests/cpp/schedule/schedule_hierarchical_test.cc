#include <gtest/gtest.h>

#include <algorithm>

#include "gradwire/base/error.h"
#include "gradwire/schedule/generators.h"
#include "schedule_catalogue.h"

namespace gradwire::schedule {
namespace schedule_hierarchical_test {

using Groups = std::vector<std::vector<Rank>>;

Recipe over(const Groups& groups, std::string algorithm) {
  int ranks = 0;
  for (const auto& group : groups) ranks += static_cast<int>(group.size());
  return {Collective::kAllReduce, std::move(algorithm), ranks, 0, groups};
}

Groups equal_groups(int groups, int size) {
  Groups result(static_cast<std::size_t>(groups));
  for (Rank r = 0; r < groups * size; ++r) result[static_cast<std::size_t>(r / size)].push_back(r);
  return result;
}

// Hosts of one size, of different sizes, alone, single-ranked, and with ranks dealt round robin.
std::vector<Groups> host_maps() {
  std::vector<Groups> maps = {{{0}, {1, 2}},
                              {{3, 1, 2}, {0}},
                              {{0, 2, 4}, {1, 3, 5}},
                              {{0, 1, 2, 3}, {4, 5, 6, 7, 8}},
                              {{5, 0}, {1, 2, 3, 6}, {4}}};
  for (int groups = 1; groups <= 4; ++groups)
    for (int size = 1; size <= 6; ++size) maps.push_back(equal_groups(groups, size));
  return maps;
}

std::vector<std::string_view> inner_algorithms() {
  std::vector<std::string_view> names = algorithms(Collective::kAllReduce);
  std::erase(names, "recursive_doubling");
  return names;
}

std::string pair_name(std::string_view inner, std::string_view outer) {
  return "hierarchical(" + std::string(inner) + "," + std::string(outer) + ")";
}

void for_each_hierarchy(const auto& check) {
  for (const Groups& groups : host_maps())
    for (std::string_view inner : inner_algorithms())
      for (std::string_view outer : algorithms(Collective::kAllReduce))
        check(over(groups, pair_name(inner, outer)), outer);
}

TEST(Hierarchical, EveryPairVerifiesOnEveryHostMap) {
  for_each_hierarchy([](const Recipe& recipe, std::string_view) {
    const Schedule schedule = generate(recipe);
    const Report report = verify(schedule);
    EXPECT_TRUE(report.ok()) << label(recipe) << problems_of(report);
    EXPECT_EQ(schedule.name, recipe.algorithm);
    EXPECT_EQ(parse_schedule(to_text(schedule)), schedule);
  });
}

TEST(Hierarchical, IsAnInTreeWhenTheOuterAlgorithmIs) {
  for_each_hierarchy([](const Recipe& recipe, std::string_view outer) {
    const bool owned = outer != "recursive_doubling" || recipe.groups.size() == 1;
    EXPECT_EQ(verify(generate(recipe)).in_tree, owned) << label(recipe);
  });
}

std::vector<int> host_of(const Recipe& recipe) {
  std::vector<int> host(static_cast<std::size_t>(recipe.ranks));
  for (std::size_t g = 0; g < recipe.groups.size(); ++g)
    for (Rank r : recipe.groups[g]) host[static_cast<std::size_t>(r)] = static_cast<int>(g);
  return host;
}

// What each rank sends to other hosts, in units of the buffer.
std::vector<double> sent_between_hosts(const Recipe& recipe) {
  const std::vector<int> host = host_of(recipe);
  const Schedule schedule = generate(recipe);
  std::vector<double> sent(host.size());
  for (const Round& round : schedule.rounds)
    for (const Edge& edge : round) {
      const auto src = static_cast<std::size_t>(edge.src);
      if (host[src] != host[static_cast<std::size_t>(edge.dst)])
        sent[src] += static_cast<double>(edge.chunks.size()) / schedule.chunks;
    }
  return sent;
}

TEST(Hierarchical, EqualHostsShareTheLinkBetweenThem) {
  for (const char* inner : {"ring", "halving_doubling", "direct"})
    for (double sent : sent_between_hosts(over(equal_groups(3, 4), pair_name(inner, "ring"))))
      EXPECT_NEAR(sent, 2 * (2.0 / 3) / 4, 1e-12) << inner;
}

TEST(Hierarchical, UnequalHostsTalkThroughTheirFirstRanks) {
  const auto sent = sent_between_hosts(over({{3, 1, 2}, {4, 0}}, "hierarchical(ring,ring)"));
  EXPECT_EQ(sent, (std::vector<double>{0, 0, 0, 1, 1}));
}

TEST(Hierarchical, RoundsAreInnerOuterInner) {
  const Report report =
      verify(generate(over(equal_groups(4, 3), "hierarchical(ring,recursive_doubling)")));
  EXPECT_EQ(report.shape.rounds, 2 + 2 + 2);
  EXPECT_NEAR(report.shape.max_sent, 2 * (2.0 / 3) + 2 * (1.0 / 3), 1e-12);
}

TEST(Hierarchical, BlanksInTheNameDoNotMatter) {
  const Groups groups = equal_groups(2, 2);
  EXPECT_EQ(generate(over(groups, "hierarchical( ring , direct )")),
            generate(over(groups, "hierarchical(ring,direct)")));
}

std::string error_of(const Recipe& recipe) {
  try {
    generate(recipe);
  } catch (const ScheduleError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Hierarchical, GroupsMustBeAPartitionOfTheRanks) {
  for (const Groups& groups :
       {Groups{}, Groups{{0, 1}}, Groups{{0, 1}, {1, 2}}, Groups{{0, 1}, {2, 4}},
        Groups{{0, 1}, {2, -1}}, Groups{{0, 1, 2, 3}, {3}}}) {
    const Recipe recipe{Collective::kAllReduce, "hierarchical(ring,ring)", 4, 0, groups};
    EXPECT_NE(error_of(recipe).find("every rank 0 .. 3 once"), std::string::npos)
        << error_of(recipe);
  }
  EXPECT_NE(error_of(over({{0, 1}, {}}, "hierarchical(ring,ring)")).find("a group is empty"),
            std::string::npos);
}

// All lists of up to four numbers of which some are no ranks, cut into two groups everywhere.
TEST(Hierarchical, GroupsAreTakenIfAndOnlyIfTheyListEachRankOnce) {
  constexpr int kRanks = 3;
  const std::vector<Rank> all = {0, 1, 2};
  std::vector<std::vector<Rank>> lists(1);
  for (std::size_t i = 0; i < lists.size(); ++i) {
    const std::vector<Rank> list = lists[i];
    std::vector<Rank> sorted = list;
    std::sort(sorted.begin(), sorted.end());
    for (std::size_t cut = 0; cut <= list.size(); ++cut) {
      const auto middle = list.begin() + static_cast<std::ptrdiff_t>(cut);
      const Groups groups = {{list.begin(), middle}, {middle, list.end()}};
      const bool good = sorted == all && cut > 0 && cut < list.size();
      const Recipe recipe{Collective::kAllReduce, "hierarchical(ring,ring)", kRanks, 0, groups};
      const std::string error = error_of(recipe);
      EXPECT_EQ(error == "no error", good) << testing::PrintToString(groups);
      EXPECT_EQ(error.starts_with("hierarchical: "), !good) << error;
    }
    for (Rank next = -1; list.size() < 4 && next <= kRanks; ++next) {
      lists.push_back(list);
      lists.back().push_back(next);
    }
  }
}

TEST(Hierarchical, WrongNamesAreRefused) {
  const Groups groups = equal_groups(2, 2);
  for (const char* name :
       {"hierarchical(ring,rings)", "hierarchical(,)", "hierarchical(ring)", "hierarchical(",
        "hierarchical()", "hierarchical(ring,hierarchical(ring,ring))", "hierarchical"})
    EXPECT_NE(error_of(over(groups, name)).find("use one of: ring, "), std::string::npos) << name;
  EXPECT_NE(
      error_of(over(groups, "hierarchical(recursive_doubling,ring)")).find("can only be the outer"),
      std::string::npos);
  Recipe gather = over(groups, "hierarchical(ring,ring)");
  gather.collective = Collective::kAllGather;
  EXPECT_NE(error_of(gather).find("all_gather has no algorithm"), std::string::npos);
}

}  // namespace schedule_hierarchical_test
}  // namespace gradwire::schedule
