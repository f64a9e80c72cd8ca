#include "gradwire/exec/control/inquest.h"

#include <gtest/gtest.h>

namespace gradwire::exec {
namespace {

using transport::ControlFrame;
using transport::ControlType;

ControlFrame told(std::uint32_t calls, std::uint32_t fingerprint, std::uint64_t digest,
                  std::string_view text, ControlType type = ControlType::kAnswer) {
  ControlFrame frame;
  frame.type = type;
  frame.calls = calls;
  frame.fingerprint = fingerprint;
  frame.digest = digest;
  transport::set_text(frame, text);
  return frame;
}

TEST(Inquest, GroupsTheRanksByWhatTheyCalled) {
  Inquest inquest(5);
  for (Rank rank : {0, 1, 3, 4}) inquest.hear(rank, told(8, 1, 10, "all_reduce(A)"));
  inquest.hear(2, told(8, 2, 20, "broadcast(B)"));
  EXPECT_EQ(inquest.verdict(),
            "ranks disagree in call 7: ranks 0, 1, 3, 4 called all_reduce(A); rank 2 called "
            "broadcast(B)");
}

TEST(Inquest, BlamesTheFirstCallThatDiffers) {
  Inquest inquest(2);
  for (Rank rank : {0, 1}) inquest.hear(rank, told(1, 5, 50, "a"));
  inquest.hear(0, told(2, 6, 60, "b"));
  inquest.hear(1, told(2, 7, 70, "c"));
  inquest.hear(0, told(3, 7, 61, "c"));
  inquest.hear(1, told(3, 6, 71, "b"));
  EXPECT_EQ(inquest.verdict(), "ranks disagree in call 1: rank 0 called b; rank 1 called c");
}

TEST(Inquest, SaysWhoSaidNothing) {
  Inquest inquest(5);
  inquest.hear(0, told(3, 1, 10, "a"));
  inquest.hear(1, told(3, 2, 20, "b"));
  inquest.hear(2, told(2, 1, 10, "a"));
  inquest.dismiss(2);
  inquest.hear(3, told(1, 1, 10, "a", ControlType::kBye));
  inquest.dismiss(3);
  EXPECT_EQ(
      inquest.verdict(),
      "ranks disagree in call 2: rank 0 called a; rank 1 called b; rank 2 had not come to it; "
      "rank 3 left after 1 call; rank 4 did not say in time");
}

TEST(Inquest, KnowsThatAnEarlierCallDiffered) {
  Inquest inquest(3);
  for (Rank rank : {0, 2}) inquest.hear(rank, told(100, 1, 10, "a"));
  inquest.hear(1, told(100, 1, 20, "a"));
  EXPECT_EQ(inquest.verdict(),
            "ranks disagree in a call before call 99, a, too long ago to say which: ranks 0, 2 "
            "against rank 1");
}

TEST(Inquest, ComparesHowManyCallsWereMade) {
  Inquest inquest(3);
  for (Rank rank : {0, 1}) inquest.hear(rank, told(2, 1, 10, "a", ControlType::kBye));
  inquest.hear(2, told(1, 3, 30, "b", ControlType::kBye));
  EXPECT_EQ(inquest.verdict(),
            "ranks disagree in call 1: ranks 0, 1 called a; rank 2 left after 1 call");
}

TEST(Inquest, FindsNothingWhereNothingDiffers) {
  Inquest inquest(2);
  for (Rank rank : {0, 1}) inquest.hear(rank, told(2, 1, 10, "a", ControlType::kBye));
  EXPECT_EQ(inquest.verdict(), "");
}

TEST(Inquest, IsOverWhenAllAreDismissed) {
  Inquest inquest(2);
  inquest.dismiss(1);
  EXPECT_FALSE(inquest.is_over());
  inquest.dismiss(0);
  EXPECT_TRUE(inquest.is_over());
}

TEST(NameRanks, JoinsRuns) {
  EXPECT_EQ(name_ranks({3}), "rank 3");
  EXPECT_EQ(name_ranks({0, 1}), "ranks 0, 1");
  EXPECT_EQ(name_ranks({0, 1, 2, 5, 7, 8, 9}), "ranks 0-2, 5, 7-9");
}

}  // namespace
}  // namespace gradwire::exec
