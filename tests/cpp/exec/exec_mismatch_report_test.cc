#include "gradwire/exec/control/mismatch_report.h"

#include <gtest/gtest.h>

namespace gradwire::exec {
namespace exec_mismatch_report_test {

using transport::ControlFrame;
using transport::ControlType;

ControlFrame frame(std::uint32_t calls, std::uint32_t fingerprint, std::uint64_t digest,
                   std::string_view text, ControlType type = ControlType::kAnswer) {
  ControlFrame frame;
  frame.type = type;
  frame.calls = calls;
  frame.fingerprint = fingerprint;
  frame.digest = digest;
  transport::set_text(frame, text);
  return frame;
}

TEST(MismatchReport, GroupsTheRanksByWhatTheyCalled) {
  MismatchReport report(5);
  for (Rank rank : {0, 1, 3, 4}) report.add(rank, frame(8, 1, 10, "all_reduce(A)"));
  report.add(2, frame(8, 2, 20, "broadcast(B)"));
  EXPECT_EQ(report.summary(),
            "ranks disagree in call 7: ranks 0, 1, 3, 4 called all_reduce(A); rank 2 called "
            "broadcast(B)");
}

TEST(MismatchReport, BlamesTheFirstCallThatDiffers) {
  MismatchReport report(2);
  for (Rank rank : {0, 1}) report.add(rank, frame(1, 5, 50, "a"));
  report.add(0, frame(2, 6, 60, "b"));
  report.add(1, frame(2, 7, 70, "c"));
  report.add(0, frame(3, 7, 61, "c"));
  report.add(1, frame(3, 6, 71, "b"));
  EXPECT_EQ(report.summary(), "ranks disagree in call 1: rank 0 called b; rank 1 called c");
}

TEST(MismatchReport, SaysWhoSaidNothing) {
  MismatchReport report(5);
  report.add(0, frame(3, 1, 10, "a"));
  report.add(1, frame(3, 2, 20, "b"));
  report.add(2, frame(2, 1, 10, "a"));
  report.mark_final(2);
  report.add(3, frame(1, 1, 10, "a", ControlType::kBye));
  report.mark_final(3);
  EXPECT_EQ(
      report.summary(),
      "ranks disagree in call 2: rank 0 called a; rank 1 called b; rank 2 had not come to it; "
      "rank 3 left after 1 call; rank 4 did not say in time");
}

// A rank that is beyond the call, and has forgotten it.
TEST(MismatchReport, WhoIsDoneWithTheCallHasNotLeftItOut) {
  MismatchReport report(4);
  report.add(0, frame(3, 1, 10, "a"));
  report.add(1, frame(3, 2, 20, "b"));
  report.add(2, frame(4, 1, 10, "later"));
  report.mark_final(2);
  report.add(3, frame(2, 1, 10, "before"));
  report.mark_final(3);
  EXPECT_EQ(report.summary(),
            "ranks disagree in call 2: rank 0 called a; rank 1 called b; rank 2 did not say in "
            "time; rank 3 had not come to it");
}

TEST(MismatchReport, TellsFourCallsAndCountsTheOthers) {
  for (int ranks = 2; ranks <= 7; ++ranks) {
    MismatchReport report(ranks);
    std::string expected = "ranks disagree in call 0: ";
    for (Rank rank = 0; rank < ranks; ++rank) {
      const auto number = static_cast<std::uint32_t>(rank);
      const std::string call = "call " + std::string(1, static_cast<char>('a' + rank));
      report.add(rank, frame(1, number + 1, number + 10, call));
      if (rank < 4)
        expected += (rank > 0 ? "; rank " : "rank ") + std::to_string(rank) + " called " + call;
    }
    if (ranks > 4) expected += "; " + std::to_string(ranks - 4) + " other calls by the rest";
    EXPECT_EQ(report.summary(), expected);
  }
}

TEST(MismatchReport, KeepsTheValueThatAnAnswerBrings) {
  MismatchReport report(3);
  const auto say = [&](Rank from, ControlType type, std::uint64_t value, std::uint32_t flags = 0) {
    ControlFrame said = frame(2, 1, 10, "a", type);
    said.value = value;
    said.flags = flags;
    report.add(from, said);
  };
  say(0, ControlType::kPosition, 99);
  EXPECT_EQ(report.value(1, 0), std::nullopt);
  say(0, ControlType::kAnswer, 5);
  EXPECT_EQ(report.value(1, 0), 5U);
  say(0, ControlType::kPosition, 99);
  say(0, ControlType::kAnswer, 98, transport::kLast);
  EXPECT_EQ(report.value(1, 0), 5U);
  say(1, ControlType::kAnswer, 0, transport::kLast);
  EXPECT_EQ(report.value(1, 1), std::nullopt);
  EXPECT_EQ(report.value(0, 0), std::nullopt);
  EXPECT_EQ(report.value(1, 2), std::nullopt);
}

TEST(MismatchReport, ARankBeforeItsFirstCallSaysNothingOfCalls) {
  MismatchReport report(2);
  report.add(0, frame(0, 1, 10, "a"));
  report.add(1, frame(0, 2, 20, "b"));
  EXPECT_EQ(report.value(0xFFFFFFFF, 0), std::nullopt);
  EXPECT_EQ(report.summary().find("ranks disagree"), std::string::npos);
}

TEST(MismatchReport, KnowsThatAnEarlierCallDiffered) {
  MismatchReport report(3);
  for (Rank rank : {0, 2}) report.add(rank, frame(100, 1, 10, "a"));
  report.add(1, frame(100, 1, 20, "a"));
  EXPECT_EQ(report.summary(),
            "ranks disagree in a call before call 99, a, too long ago to say which: ranks 0, 2 "
            "against rank 1");
}

TEST(MismatchReport, ComparesHowManyCallsWereMade) {
  MismatchReport report(3);
  for (Rank rank : {0, 1}) report.add(rank, frame(2, 1, 10, "a", ControlType::kBye));
  report.add(2, frame(1, 3, 30, "b", ControlType::kBye));
  EXPECT_EQ(report.summary(),
            "ranks disagree in call 1: ranks 0, 1 called a; rank 2 left after 1 call");
}

TEST(MismatchReport, FindsNothingWhereNothingDiffers) {
  MismatchReport report(2);
  for (Rank rank : {0, 1}) report.add(rank, frame(2, 1, 10, "a", ControlType::kBye));
  EXPECT_EQ(report.summary(), "");
}

TEST(MismatchReport, IsOverWhenAllAreDismissed) {
  MismatchReport report(2);
  report.mark_final(1);
  EXPECT_FALSE(report.is_complete());
  report.mark_final(0);
  EXPECT_TRUE(report.is_complete());
}

TEST(NameRanks, JoinsRuns) {
  EXPECT_EQ(name_ranks({3}), "rank 3");
  EXPECT_EQ(name_ranks({0, 1}), "ranks 0, 1");
  EXPECT_EQ(name_ranks({0, 1, 2, 5, 7, 8, 9}), "ranks 0-2, 5, 7-9");
}

}  // namespace exec_mismatch_report_test
}  // namespace gradwire::exec
