#include <gtest/gtest.h>

#include <random>

#include "gradwire/base/error.h"
#include "gradwire/schedule/schedule.h"
#include "schedule_catalogue.h"

namespace gradwire::schedule {
namespace schedule_text_test {

constexpr const char* kRingOfTwo =
    "gradwire schedule 1\n"
    "all_reduce ring ranks=2 chunks=2 root=0\n"
    "round 0\n"
    "  0 -> 1 reduce 1\n"
    "  1 -> 0 reduce 0\n"
    "round 1\n"
    "  0 -> 1 copy 0\n"
    "  1 -> 0 copy 1\n";

std::string error_of(const std::string& text) {
  try {
    parse_schedule(text);
  } catch (const ScheduleError& error) {
    return error.what();
  }
  return "no error";
}

TEST(ScheduleText, EveryRecipeComesBackEqual) {
  for (const Recipe& recipe : all_recipes()) {
    const Schedule schedule = generate(recipe);
    EXPECT_EQ(parse_schedule(to_text(schedule)), schedule) << label(recipe);
  }
}

TEST(ScheduleText, IsWhatTheHeaderPromises) {
  EXPECT_EQ(to_text(all_reduce_by("ring", 2)), kRingOfTwo);
  EXPECT_NE(to_text(all_reduce_by("star", 2)).find("0 -> 1 copy 0\n"), std::string::npos);
  EXPECT_NE(to_text(generate(recipe_of(Collective::kAllGather, "halving_doubling", 4)))
                .find("0 -> 2 copy 0:2\n"),
            std::string::npos);
}

TEST(ScheduleText, CommentsBlanksAndOrderOfFieldsDoNotMatter) {
  const Schedule schedule = parse_schedule(
      "# mine\n\n  gradwire   schedule 1\r\n"
      "all_reduce ring chunks=2 ranks=2   # root is 0\n"
      "round 0 # first\n0 -> 1 reduce 1:2\n\t1 -> 0 reduce 0\n"
      "\nround 1\n0 -> 1 copy 0\n1 -> 0 copy 1");
  EXPECT_EQ(schedule, all_reduce_by("ring", 2));
}

TEST(ScheduleText, EmptyRoundsAreKept) {
  const std::string text = std::string(kRingOfTwo) + "round 2\nround 3\n";
  EXPECT_EQ(parse_schedule(text).rounds.size(), 4u);
  EXPECT_EQ(to_text(parse_schedule(text)), text);
}

struct Hostile {
  const char* text;
  const char* error;
};

constexpr const char* kHead = "gradwire schedule 1\nall_reduce x ranks=2 chunks=2\n";

TEST(ScheduleText, ErrorsNameTheLine) {
  const Hostile cases[] = {
      {"", "line 0: the text ends before its header"},
      {"gradwire schedule 1\n", "line 1: the text ends before its header"},
      {"gradwire schedule 2\n", "line 1: expected 'gradwire schedule 1'"},
      {"\n\nhello\n", "line 3: expected 'gradwire schedule 1'"},
      {"gradwire schedule 1\nall_reduce x\n", "line 2: expected 'collective name"},
      {"gradwire schedule 1\nall_reduces x ranks=2 chunks=1\n",
       "line 2: unknown collective 'all_reduces'"},
      {"gradwire schedule 1\nall_reduce x ranks=2 root=0\n", "line 2: the header lacks chunks="},
      {"gradwire schedule 1\nall_reduce x ranks=2 ranks=2\n", "line 2: field 'ranks' given twice"},
      {"gradwire schedule 1\nall_reduce x ranks=2 chunks=2 rnaks=1\n",
       "line 2: unknown field 'rnaks=1'"},
      {"gradwire schedule 1\nall_reduce x ranks chunks=2\n", "line 2: unknown field 'ranks'"},
      {"gradwire schedule 1\nall_reduce x ranks= chunks=2\n", "line 2: expected a whole number"},
      {"gradwire schedule 1\nall_reduce x ranks=0 chunks=2\n", "line 2: ranks=0 is not in 1 .."},
      {"gradwire schedule 1\nall_reduce x ranks=2 chunks=0\n", "line 2: chunks=0 is not in 1 .."},
      {"gradwire schedule 1\nall_gather x ranks=2 chunks=3\n",
       "line 2: all_gather over 2 ranks has 2 chunks, not 3"},
      {"gradwire schedule 1\nall_reduce x ranks=2 chunks=2 root=1\n",
       "line 2: all_reduce has no root"},
      {"gradwire schedule 1\nbroadcast x ranks=2 chunks=2 root=2\n",
       "line 2: root 2 is not in 0 .. 1"},
  };
  for (const Hostile& each : cases)
    EXPECT_NE(error_of(each.text).find(each.error), std::string::npos)
        << each.text << "\n-> " << error_of(each.text);
}

TEST(ScheduleText, ErrorsInEdgesNameTheLine) {
  const Hostile cases[] = {
      {"0 -> 1 copy 0\n", "line 3: an edge stands before 'round 0'"},
      {"round 1\n", "line 3: expected 'round 0'"},
      {"round 0\nround 0\n", "line 4: expected 'round 1'"},
      {"round 0\nround\n", "line 4: expected 'round 1'"},
      {"round 0\n0 1 copy 0\n", "line 4: expected 'round N' or 'src -> dst"},
      {"round 0\n0 -> 1 copy 0 1\n", "line 4: expected 'round N' or 'src -> dst"},
      {"round 0\n0 -> 1 add 0\n", "line 4: expected 'copy' or 'reduce', not 'add'"},
      {"round 0\n0 -> 2 copy 0\n", "line 4: round 0: edge 0 -> 2: rank 2 is not in 0 .. 1"},
      {"round 0\n-1 -> 1 copy 0\n", "line 4: expected a whole number"},
      {"round 0\n0 -> 1 copy 2\n", "line 4: round 0: edge 0 -> 1: chunks 2:3 are not a range"},
      {"round 0\n0 -> 1 copy 1:1\n", "line 4: round 0: edge 0 -> 1: chunks 1:1 are not a range"},
      {"round 0\n0 -> 1 copy 1:0\n", "line 4: round 0: edge 0 -> 1: chunks 1:0 are not a range"},
      {"round 0\n0 -> 1 copy 0:\n", "line 4: expected a whole number"},
      {"round 0\n0x0 -> 1 copy 0\n", "line 4: expected a whole number"},
      {"round 0\n0 -> 1 copy 99999999999999999999\n", "line 4: expected a whole number"},
      {"round 0\n0 -> 1 copy 2147483647\n", "line 4: expected a whole number"},
  };
  for (const Hostile& each : cases) {
    const std::string text = std::string(kHead) + each.text;
    EXPECT_NE(error_of(text).find(each.error), std::string::npos)
        << text << "\n-> " << error_of(text);
  }
}

TEST(ScheduleText, TinyTextsCannotAskForMuch) {
  for (const char* sizes : {"ranks=1073741824 chunks=1", "ranks=2 chunks=1073741824",
                            "ranks=32769 chunks=1", "ranks=2 chunks=1048577"})
    EXPECT_NE(error_of("gradwire schedule 1\nall_reduce x " + std::string(sizes) + "\n")
                  .find("is not in 1 .. "),
              std::string::npos);
  std::string rounds = kHead;
  for (int k = 0; k <= 65536; ++k) rounds += "round " + std::to_string(k) + "\n";
  EXPECT_NE(error_of(rounds).find("more than 65536 rounds"), std::string::npos);
}

TEST(ScheduleText, ErrorsRepeatOnlyAPrintableGlanceOfTheText) {
  const std::string error =
      error_of("gradwire schedule 1\n" + std::string(100000, '\x01') + " x ranks=2 chunks=2\n");
  EXPECT_LT(error.size(), 200u);
  EXPECT_EQ(error.find('\x01'), std::string::npos);
}

// Whatever bytes change, the text is read, or refused with a line: nothing else is thrown. What is
// read survives the verifier and comes back equal.
TEST(ScheduleText, DamagedTextsAreReadOrRefused) {
  const std::string good = to_text(all_reduce_by("halving_doubling", 3));
  const std::string alphabet = "0123456789:->#= \n\taceoprun\xff";
  std::mt19937 random(7);
  int read = 0;
  int refused = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string text = good;
    for (unsigned damage = 0; damage <= i % 3u; ++damage)
      text[random() % text.size()] = alphabet[random() % alphabet.size()];
    try {
      const Schedule schedule = parse_schedule(text);
      ++read;
      EXPECT_EQ(parse_schedule(to_text(schedule)), schedule);
      (void)verify(schedule);
    } catch (const ScheduleError& error) {
      ++refused;
      EXPECT_EQ(std::string(error.what()).rfind("schedule text, line ", 0), 0u) << error.what();
    }
  }
  EXPECT_GT(read, 100);
  EXPECT_GT(refused, 100);
}

TEST(ScheduleDigest, IsOfEverythingButTheName) {
  const Schedule ring = all_reduce_by("ring", 4);
  Schedule renamed = ring;
  renamed.name = "mine";
  EXPECT_EQ(digest(renamed), digest(ring));
  std::vector<Schedule> others(5, ring);
  others[0].rounds.pop_back();
  others[1].rounds[0][0].landing = Landing::kCopy;
  std::swap(others[2].rounds[0][0], others[2].rounds[0][1]);
  others[3].chunks = 5;
  others[4].rounds.emplace_back();
  for (const Schedule& other : others) EXPECT_NE(digest(other), digest(ring));
}

TEST(ScheduleDigest, IsTheSameOnEveryMachine) {
  EXPECT_EQ(digest(all_reduce_by("ring", 2)), digest(parse_schedule(kRingOfTwo)));
  EXPECT_EQ(digest(all_reduce_by("ring", 2)), 7643685295391305675ULL);
}

}  // namespace schedule_text_test
}  // namespace gradwire::schedule
