// The progress thread takes turns with all that have work, and leaves alone who has left.
#include "gradwire/exec/progress_thread.h"

#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <iterator>
#include <memory>
#include <vector>

namespace gradwire::exec {
namespace exec_progress_thread_test {

std::ptrdiff_t threads() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return std::distance(begin(tasks), end(tasks));
}

// Moves only when it is its turn: `ball` is passed round among so many, `rounds` times.
class Player final : public ProgressThread::Member {
 public:
  Player(std::atomic<int>& ball, int place, int players, int rounds)
      : ball_(ball), place_(place), players_(players), left_(rounds) {}

  bool take_over() override { return left_ > 0; }
  ProgressThread::Turn turn() noexcept override {
    if (left_ == 0) return ProgressThread::Turn::kOver;
    if (ball_ % players_ != place_) return ProgressThread::Turn::kIdle;
    --left_;
    ++ball_;
    ball_.notify_all();
    return ProgressThread::Turn::kMoved;
  }
  unsigned spins() const noexcept override { return 0; }
  int before_sleep(std::vector<pollfd>& /*doorbells*/) noexcept override { return 1; }
  void after_sleep() noexcept override {}
  bool serve_between_calls() override {
    ++served;
    served.notify_all();
    return served < 2;
  }

  std::atomic<int> served{0};

 private:
  std::atomic<int>& ball_;
  const int place_, players_;
  std::atomic<int> left_;
};

void await(std::atomic<int>& value, int wanted) {
  for (int now = value; now < wanted; now = value) value.wait(now);
}

TEST(ProgressThread, OneThreadMovesAllAndEndsWithTheLast) {
  const std::ptrdiff_t before = threads();
  std::atomic<int> ball{0};
  std::vector<std::unique_ptr<Player>> players;
  for (int i = 0; i < 3; ++i) players.push_back(std::make_unique<Player>(ball, i, 3, 100));
  ProgressThread thread;
  for (auto& each : players) thread.wake(*each);
  EXPECT_EQ(threads(), before + 1);
  await(ball, 300);
  for (auto& each : players) thread.leave(*each);
  EXPECT_EQ(threads(), before);
  thread.leave(*players[0]);  // has left
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

}  // namespace exec_progress_thread_test
}  // namespace gradwire::exec
