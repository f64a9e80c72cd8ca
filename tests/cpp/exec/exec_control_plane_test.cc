#include "gradwire/exec/control/control_plane.h"

#include <gtest/gtest.h>

#include <array>
#include <memory>

#include "transport_harness.h"

namespace gradwire::exec {
namespace exec_control_plane_test {

// Four ranks' control planes in one thread: who is not asked to listen is stopped.
class Planes : public testing::Test {
 protected:
  Planes() {
    for (Rank rank = 0; rank < kRanks; ++rank)
      planes_[at(rank)] = std::make_unique<ControlPlane>(
          rank, kRanks, [this, rank] { return positions_[at(rank)]; });
    for (Rank a = 0; a < kRanks; ++a)
      for (Rank b = a + 1; b < kRanks; ++b) {
        auto [one, other] = transport::unix_ends();
        planes_[at(a)]->adopt(std::move(one), b);
        planes_[at(b)]->adopt(std::move(other), a);
      }
  }

  ControlPlane& plane(Rank rank) { return *planes_[at(rank)]; }
  void waits(Rank rank, Rank whom) {
    positions_[at(rank)] = {true, whom, 0, 0, 1, kNoPeer};
    plane(rank).announce();
  }
  void waits_elsewhere(Rank rank, Rank job_rank) {
    positions_[at(rank)] = {};
    positions_[at(rank)].elsewhere = job_rank;
    plane(rank).announce();
  }
  void poll(std::initializer_list<Rank> ranks) {
    for (Rank rank : ranks) plane(rank).poll();
  }

  static constexpr int kRanks = 4;

 private:
  static std::size_t at(Rank rank) { return static_cast<std::size_t>(rank); }
  std::array<Position, kRanks> positions_;
  std::array<std::unique_ptr<ControlPlane>, kRanks> planes_;
};

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

TEST_F(Planes, InACircleTheSilentRankIsNamed) {
  waits(0, 1);
  waits(1, 0);
  plane(0).query_positions();
  poll({1, 2, 0});
  EXPECT_EQ(plane(0).end_of_chain(1).peer, 3);
}

TEST_F(Planes, WhoClosedCleanlyIsNotExpectedToAnswer) {
  plane(3).close_gracefully(Deadline::after(0));
  plane(0).query_positions();
  poll({1, 2, 0});
  EXPECT_TRUE(plane(0).all_replied());
}

TEST_F(Planes, ALinksFailureIsExplainedByTheFailureOfAnother) {
  plane(1).say_failure(
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

TEST_F(Planes, WhoWaitsElsewhereEndsTheChainOutside) {
  waits(1, 2);
  waits_elsewhere(2, 7);
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

TEST_F(Planes, WhatEndsCallsIsKeptByWhoOnlyServes) {
  plane(3).query_positions();
  plane(1).say_failure(
      failure_frame(std::make_exception_ptr(TransportError("rank 2 is gone", 2)), 1));
  EXPECT_TRUE(plane(0).serve());
  EXPECT_FALSE(plane(0).serve());
  EXPECT_THROW(plane(0).poll(), RootCause);
}

// Near the end of 32 bits, too, an inquiry is answered.
TEST(ControlPlane, AnInquiryMayNameAnyCall) {
  for (const std::uint64_t call : {0ULL, 0xFFFFFFFEULL, 0xFFFFFFFFULL, ~0ULL}) {
    ControlPlane plane(0, 2, [] { return Position{}; });
    transport::Control peer(1, 2);
    auto [own, other] = transport::unix_ends();
    plane.adopt(std::move(own), 1);
    peer.adopt(std::move(other), 0);
    transport::ControlFrame question;
    question.type = transport::ControlType::kInquiry;
    question.value = call;
    peer.send(0, question);
    plane.poll();
    const auto answer = peer.poll();
    ASSERT_TRUE(answer);
    EXPECT_EQ(answer->frame.type, transport::ControlType::kAnswer);
    EXPECT_NE(answer->frame.flags & transport::kLast, 0u);
  }
}

struct Stop {};

// Ends a wait at its first turn.
void stop() { throw Stop(); }

TEST_F(Planes, WhoWaitsForTheRootCauseCanBeInterrupted) {
  const auto broken = std::make_exception_ptr(TransportError("the link broke", 1));
  EXPECT_THROW(plane(0).root_cause(broken, stop), Stop);
}

TEST_F(Planes, AnInquiryCanBeInterrupted) {
  EXPECT_THROW(plane(0).inquire({0, "they differ"}, stop), Stop);
}

TEST_F(Planes, ALeaveCanBeInterrupted) {
  const Deadline together = Deadline::after(30);
  EXPECT_THROW(plane(0).close_gracefully({Deadline::never(), stop}, together), Stop);
}

}  // namespace exec_control_plane_test
}  // namespace gradwire::exec
