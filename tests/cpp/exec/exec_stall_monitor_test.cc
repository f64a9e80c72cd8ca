#include "gradwire/exec/control/stall_monitor.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <thread>

#include "exec_ranks.h"
#include "gradwire/base/error.h"

namespace gradwire::exec {
namespace exec_stall_monitor_test {

// A job of which no other rank is found by its page, so that only control frames count.
// A job that no other process is in: status pages of a host are found by their job's tag.
Identity alone() {
  Identity identity;
  identity.size = 3;
  identity.tag = static_cast<std::uint64_t>(::getpid());
  return identity;
}

Wait in_call(std::uint32_t number, Rank peer) {
  Wait wait;
  wait.number = number;
  wait.peer = peer;
  wait.round = 2;
  wait.segment = 4;
  wait.spec = "all_reduce(float32[10])";
  return wait;
}

// Rank 0's control plane, and the controls of ranks 1 and 2.
struct Planes {
  Planes() {
    for (Rank peer : {1, 2}) {
      auto [own, theirs] = transport::ends_for("shm");
      mine.sockets().adopt(std::move(own), peer);
      (peer == 1 ? one : two).adopt(std::move(theirs), 0);
    }
  }
  // Rank 1 is in call 12.
  void check_failure(Rank waits_for) {
    transport::ControlFrame frame;
    frame.type = transport::ControlType::kPosition;
    frame.calls = 13;
    frame.flags = transport::kInCall;
    frame.culprit = waits_for;
    transport::set_text(frame, "all_reduce(float32[10])");
    one.send(0, frame);
    pollfd bell{mine.sockets().doorbell(), POLLIN, 0};
    ASSERT_EQ(::poll(&bell, 1, 30'000), 1);
    mine.poll();
  }
  ControlPlane mine{0, 3, nullptr};
  transport::Control one{1, 3}, two{2, 3};
};

// A watch of which a report is due.
struct Due {
  explicit Due(double stall_seconds)
      : watch(alone(), stall_seconds, [this](std::string_view line) { lines.emplace_back(line); }) {
    watch.begin(0, 1);
  }
  void report(const Wait& wait, const ControlPlane& control) {
    while (!watch.due()) std::this_thread::yield();
    watch.report(wait, control);
  }
  std::vector<std::string> lines;
  StallMonitor watch;
};

TEST(StallMonitor, TellsWhatIsKnownOfARankThatSaidNothing) {
  Planes planes;
  Due due(0.01);
  due.report(in_call(12, 1), planes.mine);
  ASSERT_EQ(due.lines.size(), 1U);
  EXPECT_EQ(due.lines[0],
            "rank 0: all_reduce(float32[10]), call 12, has not moved for 0.01 s: it waits for rank "
            "1 to send segment 4 of round 2; rank 1 has said nothing: it is outside gradwire, or "
            "stopped, or cannot be reached. All ranks of a host: gradwire doctor --job");
}

TEST(StallMonitor, FollowsTheChainOfThoseThatSaidForWhomTheyWait) {
  Planes planes;
  planes.check_failure(/*waits_for=*/2);
  Due due(0.01);
  due.report(in_call(12, 1), planes.mine);
  ASSERT_EQ(due.lines.size(), 1U);
  EXPECT_NE(due.lines[0].find("; rank 1 waits for rank 2 in call 12, all_reduce(float32[10]); at "
                              "the end of the chain, rank 2 has said nothing"),
            std::string::npos)
      << due.lines[0];
}

TEST(StallMonitor, TrustsAPageMoreThanAWord) {
  Planes planes;
  planes.check_failure(/*waits_for=*/kNoPeer);
  Identity one = alone();
  one.rank = 1;
  Status page(one);
  Wait wait;
  wait.activity = Activity::kReceive;
  wait.peer = 2;
  wait.spec = "recv of 8 bytes";
  page.set_waiting(wait, coarse_now());
  Due due(0.01);
  due.report(in_call(12, 1), planes.mine);
  ASSERT_EQ(due.lines.size(), 1U);
  EXPECT_NE(due.lines[0].find(") waits for rank 2 in recv of 8 bytes, message 0; at the end of "
                              "the chain, rank 2 has said nothing"),
            std::string::npos)
      << due.lines[0];
}

TEST(StallMonitor, TellsOfAnOperationOnce) {
  Planes planes;
  Due due(0.01);
  Wait wait = in_call(12, 1);
  due.report(wait, planes.mine);
  EXPECT_FALSE(due.watch.due());
  due.watch.start_idle();  // it moved in between
  wait.peer = 2;
  due.report(wait, planes.mine);
  EXPECT_EQ(due.lines.size(), 1U);
  due.watch.begin(13, 1);
  wait.number = 13;
  due.report(wait, planes.mine);
  EXPECT_EQ(due.lines.size(), 2U);
  due.watch.start_idle();
  wait.activity = Activity::kReceive;
  due.report(wait, planes.mine);
  EXPECT_EQ(due.lines.size(), 3U);
}

TEST(StallMonitor, DoesNotTellOfARecvFromAnyRankNorWhereTurnedOff) {
  Planes planes;
  Due due(0.01), never(0);
  Wait wait = in_call(12, kNoPeer);
  wait.activity = Activity::kReceive;
  due.report(wait, planes.mine);
  EXPECT_TRUE(due.lines.empty());
  wait.peer = 1;
  never.report(wait, planes.mine);
  EXPECT_FALSE(never.watch.due());
  EXPECT_TRUE(never.lines.empty());
}

TEST(StallMonitor, ShowsAfterASecondAndTellsLater) {
  Planes planes;
  Due due(3);  // long after, however late the first report is
  due.report(in_call(12, 1), planes.mine);
  EXPECT_TRUE(due.lines.empty());
  due.report(in_call(12, 1), planes.mine);
  EXPECT_EQ(due.lines.size(), 1U);
}

}  // namespace exec_stall_monitor_test
}  // namespace gradwire::exec
