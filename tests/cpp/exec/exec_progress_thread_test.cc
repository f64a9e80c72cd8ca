// The progress thread takes turns with all that have work, and leaves alone who has left.
#include "gradwire/exec/progress_thread.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <functional>
#include <iterator>
#include <memory>
#include <thread>
#include <vector>

namespace gradwire::exec {
namespace exec_progress_thread_test {

std::ptrdiff_t threads() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return std::distance(begin(tasks), end(tasks));
}

// Of all threads of the process.
double processor_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) / 1e9;
}

// Moves only when it is its turn: `ball` is passed round among so many, `rounds` times.
class Player final : public ProgressThread::Task {
 public:
  Player(std::atomic<int>& ball, int place, int players, int rounds)
      : ball_(ball), place_(place), players_(players), left_(rounds) {}

  bool take_over() override {
    if (when_taken) when_taken();
    ++asked;
    asked.notify_all();
    return left_ > 0;
  }
  ProgressThread::Turn turn() noexcept override {
    if (when_ended) return ProgressThread::Turn::kFailed;
    if (left_ == 0) return ProgressThread::Turn::kOver;
    if (ball_ % players_ != place_) return ProgressThread::Turn::kIdle;
    --left_;
    ++ball_;
    ball_.notify_all();
    return ProgressThread::Turn::kMoved;
  }
  void end_failed() noexcept override { when_ended(); }
  unsigned spins() const noexcept override { return 0; }
  int before_sleep(std::vector<pollfd>& /*doorbells*/) noexcept override {
    ++sleeps;
    sleeps.notify_all();
    return longest_sleep;
  }
  void after_sleep() noexcept override {}
  bool serve_between_calls() override {
    if (when_served) when_served();
    ++served;
    served.notify_all();
    return served < services;
  }

  std::atomic<int> asked{0}, sleeps{0}, served{0};
  int longest_sleep = 1;  // ms
  int services = 2;       // so often it wants to be served
  std::function<void()> when_taken;
  std::function<void()> when_served;
  std::function<void()> when_ended;  // it fails in its first turn

 private:
  std::atomic<int>& ball_;
  const int place_, players_;
  std::atomic<int> left_;
};

void await(std::atomic<int>& value, int wanted) {
  for (int now = value; now < wanted; now = value) value.wait(now);
}

TEST(ProgressThread, OneThreadMovesAllAndEndsWithTheLast) {
  std::thread([] {}).join();  // the first one makes a sanitizer start one of its own
  const std::ptrdiff_t before = threads();
  std::atomic<int> ball{0};
  std::vector<std::unique_ptr<Player>> players;
  for (int i = 0; i < 3; ++i) players.push_back(std::make_unique<Player>(ball, i, 3, 100));
  ProgressThread thread;
  for (auto& each : players) thread.wake(*each);
  EXPECT_LE(threads(), before + 1);
  await(ball, 300);
  for (auto& each : players) thread.leave(*each);
  while (threads() > before) std::this_thread::yield();  // joined, and counted for a moment
  thread.leave(*players[0]);                             // has left
}

TEST(ProgressThread, StartsAnew) {
  std::atomic<int> ball{0};
  ProgressThread thread;
  for (int i = 0; i < 100; ++i) {
    Player alone(ball, 0, 1, 1);
    thread.wake(alone);
    await(ball, i + 1);
    thread.leave(alone);
  }
}

TEST(ProgressThread, ServesAsLongAsAMemberWantsIt) {
  std::atomic<int> ball{0};
  Player idle(ball, 0, 1, 0), busy(ball, 0, 2, 1);  // the other one never comes
  ball = 1;
  ProgressThread thread;
  thread.wake(busy);
  thread.serve(idle);
  await(idle.served, 2);
  thread.leave(idle);
  ++ball;
  thread.leave(busy);
  EXPECT_EQ(idle.served, 2);
}

// Groups are served as long as they live, and there may be many of them.
TEST(ProgressThread, WakesSeldomHoweverManyMembersItServes) {
  constexpr int kMembers = 20, kServices = 4;
  std::atomic<int> ball{0};
  std::atomic<bool> all_ask{false};
  std::vector<std::unique_ptr<Player>> idle;
  // Those before one have been served in the same go.
  const auto look = [&](int at) {
    all_ask.wait(false);
    for (int i = 0; i < at; ++i) EXPECT_EQ(idle[i]->served, idle[at]->served + 1) << i << at;
  };
  for (int i = 0; i < kMembers; ++i) {
    idle.push_back(std::make_unique<Player>(ball, 0, 1, 0));
    idle.back()->services = kServices;
    idle.back()->when_served = [&look, i] { look(i); };
  }
  ProgressThread thread;
  const double before = processor_seconds();
  const auto began = std::chrono::steady_clock::now();
  for (auto& each : idle) thread.serve(*each);
  all_ask = true;
  all_ask.notify_all();
  for (auto& each : idle) await(each->served, kServices);
  const auto took = std::chrono::steady_clock::now() - began;
  EXPECT_GE(took, std::chrono::milliseconds(100 + (kServices - 1) * 250));
  EXPECT_LT(processor_seconds() - before, 0.1);
  for (auto& each : idle) thread.leave(*each);
}

TEST(ProgressThread, ServesSoonWhoAsksWhileOthersAreServedSeldom) {
  std::atomic<int> ball{0};
  Player idle(ball, 0, 1, 0), late(ball, 0, 1, 0);
  idle.services = 1000;
  ProgressThread thread;
  thread.serve(idle);
  await(idle.served, 1);
  const auto began = std::chrono::steady_clock::now();
  thread.serve(late);
  await(late.served, 1);
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::milliseconds(240));
  thread.leave(late);
  thread.leave(idle);
}

// One that fails asks other ranks for the cause, and waits for their answers.
TEST(ProgressThread, OneThatFailsHoldsUpNoOther) {
  std::atomic<int> ball{0};
  Player fails(ball, 0, 1, 1), busy(ball, 0, 1, 100);
  std::atomic<bool> ended{false};
  fails.when_ended = [&] {
    await(ball, 100);
    ended = true;
  };
  ProgressThread thread;
  thread.wake(fails);
  await(fails.asked, 1);
  thread.wake(busy);
  thread.leave(fails);
  EXPECT_TRUE(ended);
  thread.leave(busy);
}

TEST(ProgressThread, SleepsWhileOneThatFailsIsWoken) {
  std::atomic<int> ball{0};
  Player fails(ball, 0, 1, 1);
  ProgressThread thread;
  double took = 0;
  fails.when_ended = [&] {
    const double before = processor_seconds();
    thread.wake(fails);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    took = processor_seconds() - before;
  };
  thread.wake(fails);
  await(fails.asked, 1);
  thread.leave(fails);
  EXPECT_LT(took, 0.05);
}

// One that computes for long has nothing to be served for, which must not cost a core.
TEST(ProgressThread, SleepsWhileAMemberThatItDrivesWouldBeServed) {
  std::atomic<int> ball{1};
  Player busy(ball, 0, 2, 1);
  busy.longest_sleep = 100;
  ProgressThread thread;
  thread.wake(busy);
  await(busy.sleeps, 1);
  const auto began = std::chrono::steady_clock::now();
  thread.serve(busy);
  await(busy.sleeps, 5);  // of these, one ends at once, as it was woken
  EXPECT_GE(std::chrono::steady_clock::now() - began, std::chrono::milliseconds(250));
  ++ball;
  thread.leave(busy);
}

TEST(ProgressThread, TakesOverBeforeItSleepsWhoIsWokenMeanwhile) {
  std::atomic<int> ball{1}, other_ball{1};
  Player first(ball, 0, 2, 0), busy(ball, 0, 2, 1), last(other_ball, 0, 2, 1);
  ProgressThread thread;
  thread.wake(first);
  await(first.asked, 1);
  thread.wake(busy);
  await(busy.sleeps, 1);
  std::atomic<int> sleeps_before{0}, sleeps_until{-1};
  last.when_taken = [&] {
    sleeps_before = busy.sleeps.load();
    thread.wake(first);
  };
  first.when_taken = [&] { sleeps_until = busy.sleeps.load(); };
  thread.wake(last);
  await(first.asked, 2);
  ball = other_ball = 2;
  for (Player* each : {&last, &busy, &first}) thread.leave(*each);
  EXPECT_EQ(sleeps_until, sleeps_before);
}

}  // namespace exec_progress_thread_test
}  // namespace gradwire::exec
