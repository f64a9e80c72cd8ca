// Which calls are settled, who disagrees, and how ranks leave.
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "exec_planes.h"

namespace gradwire::exec {
namespace exec_control_calls_test {

TEST_F(Planes, ACallInWhichAllHearOfAllIsSettledByItsData) {
  plane(0).begin_call(plan_of(Collective::kAllReduce, 10));
  EXPECT_EQ(plane(0).unconfirmed_peer(), 1);
  EXPECT_FALSE(plane(0).end_call());
  EXPECT_FALSE(plane(0).has_unannounced_calls());
  EXPECT_EQ(plane(0).unconfirmed_peer(), kNoPeer);
}

TEST_F(Planes, TheFirstRankMayBeTheOneThatIsBehind) {
  call(3, Collective::kBroadcast);
  EXPECT_EQ(plane(3).unconfirmed_peer(), 0);
}

TEST_F(Planes, AnotherCallIsSettledWhenAllSayThatTheyHaveFinishedIt) {
  plane(0).begin_call(plan_of(Collective::kBroadcast, 10));
  EXPECT_TRUE(plane(0).end_call());
  EXPECT_EQ(plane(0).unconfirmed_peer(), 1);
  call(1, Collective::kBroadcast);
  waits(1, 0);  // in its call still
  poll({0});
  EXPECT_EQ(plane(0).unconfirmed_peer(), 1);
  idles(1);
  poll({0});
  EXPECT_EQ(plane(0).unconfirmed_peer(), 2);
  for (const Rank rank : {3, 2}) {
    EXPECT_EQ(plane(0).unconfirmed_peer(), 2);
    call(rank, Collective::kBroadcast);
    idles(rank);
    poll({0});
  }
  EXPECT_EQ(plane(0).unconfirmed_peer(), kNoPeer);
}

TEST_F(Planes, TheEndOfACallIsToldOutsideOfCalls) {
  call(0, Collective::kBroadcast);
  EXPECT_TRUE(plane(0).has_unannounced_calls());
  waits(0, 1);
  EXPECT_TRUE(plane(0).has_unannounced_calls());
  idles(0);
  EXPECT_FALSE(plane(0).has_unannounced_calls());
}

TEST(ControlPlane, ARankAloneTellsNobodyOfItsCalls) {
  ControlPlane plane(0, 1, [] { return Position{}; });
  plane.begin_call(plan_of(Collective::kBroadcast, 10));
  EXPECT_FALSE(plane.end_call());
  plane.close_gracefully(Deadline::after(0));
}

TEST(ControlPlane, OneOfTwoRanksTellsTheOtherOfItsCalls) {
  ControlPlane plane(0, 2, [] { return Position{}; });
  plane.begin_call(plan_of(Collective::kBroadcast, 10));
  EXPECT_TRUE(plane.end_call());
}

TEST_F(Planes, OtherCallsAreADisagreementForWhoHearsOfThem) {
  for (const Rank rank : {1, 0}) call(rank, Collective::kAllReduce, 10);
  EXPECT_NO_THROW(poll({0, 1}));
  EXPECT_THROW(call(3, Collective::kAllReduce, 11), Disagreement);
  idles(3);
  EXPECT_THROW(poll({0}), Disagreement);
}

TEST_F(Planes, WhoIsBehindComparesWhenItComesToTheCall) {
  call(1, Collective::kAllReduce, 10);
  EXPECT_NO_THROW(poll({0, 2}));
  EXPECT_NO_THROW(call(0, Collective::kAllReduce, 10));
  EXPECT_THROW(call(2, Collective::kAllReduce, 11), Disagreement);
}

TEST_F(Planes, WhoLeavesAfterAnotherNumberOfCallsDisagrees) {
  for (const Rank rank : {0, 1, 2}) call(rank, Collective::kAllReduce);
  for (const Rank rank : {1, 2}) EXPECT_NO_THROW(plane(rank).close_now());
  EXPECT_THROW(plane(3).close_now(), Disagreement);
  try {
    plane(0).close_now();
    ADD_FAILURE();
  } catch (const Disagreement& found) {
    EXPECT_EQ(found.call, 0U);
    EXPECT_NE(found.what.find("rank 3 left after 0 calls, rank 0 after 1"), std::string::npos)
        << found.what;
  }
}

TEST_F(Planes, TheFirstRankMayBeTheOneThatLeft) {
  call(3, Collective::kAllReduce);
  plane(0).close_now();
  EXPECT_THROW(plane(3).close_now(), Disagreement);
}

TEST_F(Planes, ALeaveWaitsForAllButThoseThatFailed) {
  for (const Rank rank : {0, 1, 2}) call(rank, Collective::kBroadcast);
  for (const Rank rank : {1, 2}) idles(rank);
  try {
    plane(0).close_gracefully(Deadline::after(0));
    ADD_FAILURE();
  } catch (const Timeout& error) {
    EXPECT_EQ(error.peer(), 3);
    EXPECT_NE(std::string(error.what()).find("rank 3 had made all the calls"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("the last of which is call 0, broadcast"),
              std::string::npos);
  }
  fails(3, std::make_exception_ptr(TransportError("the link broke", 2)));
  EXPECT_NO_THROW(plane(0).close_gracefully(Deadline::after(0)));
}

TEST_F(Planes, ALeaveEndsWithTheMismatchThatAnotherFound) {
  fails(3, std::make_exception_ptr(InvalidArgument("they differ")));
  EXPECT_THROW(plane(0).close_gracefully(Deadline::after(0)), RootCause);
}

// A rank of many short calls would else spend its time on words.
TEST(ControlPlane, CallsAreAnnouncedNowAndThen) {
  ControlPlane plane(0, 2, [] { return Position{true, 1, 0, 0, 0, kNoPeer}; });
  transport::Control peer(1, 2);
  auto [own, other] = transport::unix_ends();
  plane.sockets().adopt(std::move(own), 1);
  peer.adopt(std::move(other), 0);
  const auto began = ControlPlane::Clock::now();
  const auto plan = plan_of(Collective::kAllReduce, 10);
  int heard = 0;
  for (int call = 0; call < 200; ++call) {
    plane.begin_call(plan);
    plane.end_call();
    while (peer.poll()) ++heard;
  }
  const std::chrono::duration<double> passed = ControlPlane::Clock::now() - began;
  EXPECT_GE(heard, 1);
  EXPECT_LE(heard, 1 + passed.count() / 0.1);
}

// Near the end of 32 bits, too, an inquiry is answered.
TEST(ControlPlane, AnInquiryMayNameAnyCall) {
  for (const std::uint64_t call : {0ULL, 0xFFFFFFFEULL, 0xFFFFFFFFULL, ~0ULL}) {
    ControlPlane plane(0, 2, [] { return Position{}; });
    transport::Control peer(1, 2);
    auto [own, other] = transport::unix_ends();
    plane.sockets().adopt(std::move(own), 1);
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

// What a rank that has made so many calls, each of another size, answers to an inquiry for `call`.
std::vector<transport::ControlFrame> answers(std::uint32_t made, std::uint64_t call) {
  ControlPlane plane(0, 2, [] { return Position{}; });
  transport::Control peer(1, 2);
  auto [own, other] = transport::unix_ends();
  plane.sockets().adopt(std::move(own), 1);
  peer.adopt(std::move(other), 0);
  for (std::uint32_t i = 0; i < made; ++i) plane.begin_call(plan_of(Collective::kAllReduce, i + 1));
  while (peer.poll()) continue;  // its announcements
  transport::ControlFrame question;
  question.type = transport::ControlType::kInquiry;
  question.value = call;
  peer.send(0, question);
  plane.poll();
  std::vector<transport::ControlFrame> frames;
  while (const auto event = peer.poll()) frames.push_back(event->frame);
  return frames;
}

TEST(ControlPlane, AnAnswerTellsTheCallsUpToTheOneInQuestionThenTheLast) {
  constexpr std::uint32_t kMade = 20, kTold = 16;
  for (const std::uint32_t call : {2U, 15U, 18U, 19U, 22U}) {
    const auto frames = answers(kMade, call);
    std::vector<std::uint32_t> told, expected;
    for (std::uint32_t i = 0; i < kMade; ++i)
      if (i <= call && i + kTold > call) expected.push_back(i + 1);
    expected.push_back(kMade);
    for (const auto& frame : frames) told.push_back(frame.calls);
    EXPECT_EQ(told, expected) << call;
    for (const auto& frame : frames) {
      const bool last = &frame == &frames.back();
      const auto plan = plan_of(Collective::kAllReduce, frame.calls);
      EXPECT_EQ(frame.type, transport::ControlType::kAnswer);
      EXPECT_EQ((frame.flags & transport::kLast) != 0, last);
      EXPECT_EQ(transport::text_of(frame), plan->text());
      EXPECT_EQ(frame.fingerprint, plan->fingerprint());
      EXPECT_EQ(frame.value, last ? 0 : plan->bytes_to(1));
    }
  }
}

TEST_F(Planes, AnInquiryFindsWhoCalledWhat) {
  for (const Rank rank : {0, 1, 2})
    for (int made = 0; made < 3; ++made) call(rank, Collective::kAllReduce);
  for (const Collective each :
       {Collective::kAllReduce, Collective::kBroadcast, Collective::kAllReduce}) {
    try {
      call(3, each);
    } catch (const Disagreement&) {  // where it has heard of the others already
    }
  }
  const std::string text = inquire({1, "they differ"});
  EXPECT_TRUE(text.starts_with("ranks disagree in call 1: ranks 0-2 called all_reduce(")) << text;
  EXPECT_NE(text.find("; rank 3 called broadcast("), std::string::npos) << text;
}

// A gather whose blocks have so many elements, as a rank sees it.
std::shared_ptr<const Plan> gather_of(Rank rank, DType dtype, std::string moved,
                                      std::uint64_t count) {
  Binding binding;
  binding.spec.collective = Collective::kGather;
  binding.spec.dtype = dtype;
  binding.spec.moved = std::move(moved);
  binding.counts.assign(4, count);
  binding.uniform_segments = false;
  binding.rank = rank;
  binding.codec = codec::make_codec("none");
  binding.max_message = 4096;
  return std::make_shared<const Plan>(schedule::generate({Collective::kGather, "star", 4, 0, {}}),
                                      std::move(binding));
}

TEST_F(Planes, AnInquiryTellsBothSizesOfABlock) {
  struct Case {
    DType dtype;
    const char* moved;
    const char* text;
  };
  const Case cases[] = {{DType::kFloat32, "",
                         "40 bytes (10 of float32), and rank 0 expects 48 bytes (12 of float32)"},
                        {DType::kFloat32, "pairs", "40 bytes, and rank 0 expects 48 bytes"},
                        {DType::kInt8, "", "10 bytes, and rank 0 expects 12 bytes"}};
  std::uint32_t call = 0;
  for (const Case& each : cases) {
    for (Rank rank = 0; rank < kRanks; ++rank)
      plane(rank).begin_call(gather_of(rank, each.dtype, each.moved, rank == 0 ? 12 : 10));
    const std::uint64_t expected = 12 * size_of(each.dtype);
    const std::string text = inquire({call, "sizes differ", /*sender=*/1, expected});
    EXPECT_NE(text.find(std::string(": rank 1 sends rank 0 ") + each.text + ";"), std::string::npos)
        << text;
    EXPECT_TRUE(inquire({call, "they differ", kNoPeer, expected}).starts_with("they differ;"));
    const std::uint64_t sent = 10 * size_of(each.dtype);
    EXPECT_TRUE(inquire({call, "they differ", 1, sent}).starts_with("they differ;"));
    ++call;
  }
}

// It ends before its first turn where no more can come, and with a failure that is the cause of
// all.
TEST_F(Planes, AnInquiryDoesNotWaitForWhoIsGone) {
  for (const Rank rank : {0, 1, 2}) plane(rank).sockets().close_all();
  EXPECT_TRUE(text_of(plane(3).inquire({0, "they differ"}, stop)).starts_with("they differ;"));
}

TEST_F(Planes, AnInquiryDoesNotWaitForWhoWasGoneBefore) {
  for (const Rank rank : {0, 1, 2}) plane(rank).sockets().close_all();
  for (int gone = 0; gone < 3; ++gone) EXPECT_THROW(poll({3}), RootCause);
  EXPECT_TRUE(text_of(plane(3).inquire({0, "they differ"}, stop)).starts_with("they differ;"));
}

TEST_F(Planes, AnInquiryEndsWithAnothersFailure) {
  fails(2, std::make_exception_ptr(TransportError("rank 3 is gone", 3)));
  EXPECT_EQ(text_of(plane(0).inquire({0, "they differ"}, stop)), "rank 3 is gone");
}

TEST_F(Planes, AnInquiryCanBeInterrupted) {
  EXPECT_THROW(plane(0).inquire({0, "they differ"}, stop), Stop);
}

TEST_F(Planes, ALeaveCanBeInterrupted) {
  const Deadline together = Deadline::after(30);
  EXPECT_THROW(plane(0).close_gracefully({Deadline::never(), stop}, together), Stop);
}

}  // namespace exec_control_calls_test
}  // namespace gradwire::exec
