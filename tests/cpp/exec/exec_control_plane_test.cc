// Who waits for whom, and the root cause of a failure.
#include "exec_planes.h"

namespace gradwire::exec {
namespace exec_control_plane_test {

TEST_F(Planes, TheEndOfTheChainIsWhoWaitsForNobody) {
  waits(1, 2);
  waits(2, 3);
  waits(3, kNoPeer);
  poll({0});
  EXPECT_EQ(plane(0).end_of_chain(1).peer, 3);
  EXPECT_EQ(plane(0).end_of_chain(3).peer, 3);
}

TEST_F(Planes, StaleWordsAreNoExcuse) {
  waits(1, 2);
  waits(2, 3);
  waits(3, 0);
  poll({0});
  plane(0).query_positions();
  poll({1, 3, 0});  // not 2
  EXPECT_FALSE(plane(0).all_replied());
  EXPECT_EQ(plane(0).end_of_chain(1).peer, 2);
  poll({2, 0});
  EXPECT_TRUE(plane(0).all_replied());
  EXPECT_EQ(plane(0).end_of_chain(1).peer, 1);  // a circle: nobody but the neighbour is known
}

TEST_F(Planes, RankZeroIsAwaitedAsAnyOther) {
  plane(1).query_positions();
  poll({2, 3, 1});  // not 0
  EXPECT_FALSE(plane(1).all_replied());
  poll({0, 1});
  EXPECT_TRUE(plane(1).all_replied());
}

TEST_F(Planes, WhatWasSentBeforeAQueryIsNoAnswerToIt) {
  waits(1, 2);
  waits(2, 3);
  waits(3, kNoPeer);
  plane(0).query_positions();  // before this rank has read any of it
  poll({0});
  EXPECT_FALSE(plane(0).all_replied());
  for (const Rank peer : {1, 2, 3}) EXPECT_EQ(plane(0).end_of_chain(peer).peer, peer) << "silent";
  poll({1, 3, 0});
  EXPECT_FALSE(plane(0).all_replied());
  EXPECT_EQ(plane(0).end_of_chain(1).peer, 2);
  poll({2, 0});
  EXPECT_TRUE(plane(0).all_replied());
  EXPECT_EQ(plane(0).end_of_chain(1).peer, 3);
}

TEST_F(Planes, InACircleTheSilentRankIsNamed) {
  waits(0, 1);
  waits(1, 0);
  plane(0).query_positions();
  poll({1, 2, 0});
  EXPECT_EQ(plane(0).end_of_chain(1).peer, 3);
}

TEST_F(Planes, InACircleWhoIsOutsideIsNamedIfNobodyIsSilent) {
  waits(0, 1);
  waits(1, 0);
  waits(2, 0);
  plane(0).query_positions();
  poll({1, 2, 3, 0});
  EXPECT_TRUE(plane(0).has_replied(3));
  EXPECT_EQ(plane(0).end_of_chain(1).peer, 3);
}

TEST_F(Planes, AWordOfARankResetsItsSilence) {
  const double before = plane(0).seconds_since_message_of(1);
  waits(1, 2);
  poll({0});
  EXPECT_LE(plane(0).seconds_since_message_of(1), plane(0).seconds_since_message_of(2));
  EXPECT_GE(plane(0).seconds_since_message_of(2), before);
  EXPECT_EQ(plane(0).text_of_position(1).substr(0, 29), "rank 1 waits for rank 2 in ca");
}

TEST_F(Planes, WhoClosedCleanlyIsNotExpectedToAnswer) {
  plane(3).close_gracefully(Deadline::after(0));
  plane(2).close_now();
  plane(0).query_positions();
  poll({1, 0});
  EXPECT_TRUE(plane(0).all_replied());
}

TEST_F(Planes, RepliesAreAwaitedUntilAllHaveComeOrTimeIsUp) {
  plane(0).query_positions();
  EXPECT_TRUE(plane(0).awaits_replies(60));
  EXPECT_FALSE(plane(0).awaits_replies(0));
  poll({1, 2, 0});
  EXPECT_TRUE(plane(0).awaits_replies(60));
  poll({3, 0});
  EXPECT_FALSE(plane(0).awaits_replies(60));
}

TEST_F(Planes, ALinksFailureIsExplainedByTheFailureOfAnother) {
  plane(1).sockets().broadcast(
      failure_frame(std::make_exception_ptr(TransportError("rank 2 is gone", 2)), 1));
  const auto cause =
      plane(0).root_cause(std::make_exception_ptr(TransportError("the link broke", 1)));
  try {
    std::rethrow_exception(cause);
  } catch (const TransportError& error) {
    EXPECT_EQ(error.peer(), 2);
    EXPECT_STREQ(error.what(), "rank 2 is gone");
  }
}

TEST_F(Planes, TheExplanationOfALinksFailureMayComeLater) {
  int turns = 0;
  const auto broken = std::make_exception_ptr(TransportError("the link broke", 1));
  const auto cause = plane(0).root_cause(broken, [&] {
    if (++turns == 1) fails(1, std::make_exception_ptr(TransportError("rank 2 is gone", 2)));
  });
  EXPECT_EQ(text_of(cause), "rank 2 is gone");
}

TEST_F(Planes, WhoWaitsElsewhereEndsTheChainOutside) {
  waits(1, 2);
  awaited_by_others(2, 7);
  poll({0});
  EXPECT_EQ(plane(0).end_of_chain(1).peer, kNoPeer);
  EXPECT_EQ(plane(0).end_of_chain(1).job_peer, 7);
  plane(0).query_positions();
  poll({1});
  plane(2).serve();
  poll({0});
  EXPECT_EQ(plane(0).end_of_chain(1).job_peer, 7);
  plane(0).query_positions();
  poll({1, 0});  // not 2
  EXPECT_EQ(plane(0).end_of_chain(1).peer, 2);
}

TEST_F(Planes, WhoOnlyServesKnowsWhetherItWasAsked) {
  waits(1, 2);
  EXPECT_FALSE(plane(0).serve());
  plane(2).query_positions();
  waits(1, 3);
  EXPECT_TRUE(plane(0).serve());
  EXPECT_FALSE(plane(0).serve());
  plane(2).poll();
  EXPECT_GT(plane(2).last_position_of(0).received_at, ControlPlane::Clock::time_point());
}

TEST_F(Planes, WhatEndsCallsIsKeptByWhoOnlyServes) {
  plane(3).query_positions();
  plane(1).sockets().broadcast(
      failure_frame(std::make_exception_ptr(TransportError("rank 2 is gone", 2)), 1));
  EXPECT_TRUE(plane(0).serve());
  EXPECT_FALSE(plane(0).serve());
  EXPECT_THROW(plane(0).poll(), RootCause);
}

TEST_F(Planes, APositionTellsTheCallAndTheWait) {
  stands(1, {true, 3, 5, 7, 0.25, kNoPeer});
  plane(1).begin_call(plan_of(Collective::kBroadcast, 10), {9, "(2, 5)"});
  poll({0});
  const auto& frame = plane(0).last_position_of(1).frame;
  EXPECT_EQ(frame.type, transport::ControlType::kPosition);
  EXPECT_EQ(frame.calls, 1U);
  EXPECT_EQ(frame.flags, transport::kInCall);
  EXPECT_EQ(frame.culprit, 3);
  EXPECT_EQ(frame.round, 5);
  EXPECT_EQ(frame.segment, 7U);
  EXPECT_EQ(frame.value, 250U);
  EXPECT_EQ(transport::text_of(frame), plane(1).history().after(1)->text());
  EXPECT_EQ(frame.digest, plane(1).history().after(1)->digest);
  EXPECT_EQ(frame.fingerprint, plane(1).history().after(1)->fingerprint);
}

TEST_F(Planes, WhoClosedIsTheCauseWhereItsLinkEnds) {
  call(0, Collective::kBroadcast);
  plane(1).close_now(/*alone=*/true);
  const auto broken = std::make_exception_ptr(TransportError("the link broke", 1));
  try {
    std::rethrow_exception(plane(0).root_cause(broken, stop));  // at once
  } catch (const TransportError& error) {
    EXPECT_EQ(error.peer(), 1);
    EXPECT_TRUE(error.only_this_communicator());
    EXPECT_TRUE(std::string(error.what())
                    .starts_with("rank 0: rank 1 closed its communicator, or ended its program, "
                                 "after 0 calls, while "
                                 "others still waited for it in call 0, broadcast"))
        << error.what();
  }
}

TEST_F(Planes, AnErrorOfTheProgramIsItsOwnCause) {
  const auto wrong = std::make_exception_ptr(InvalidArgument("no such dtype"));
  EXPECT_EQ(plane(0).root_cause(wrong), wrong);
}

TEST_F(Planes, WhoWaitsForTheRootCauseCanBeInterrupted) {
  const auto broken = std::make_exception_ptr(TransportError("the link broke", 1));
  EXPECT_THROW(plane(0).root_cause(broken, stop), Stop);
}

}  // namespace exec_control_plane_test
}  // namespace gradwire::exec
