// The states of a communicator, and who may use what its driver has.
#include <gtest/gtest.h>

#include "gradwire/exec/exclusive.h"
#include "gradwire/exec/life_cycle.h"

namespace gradwire::exec {
namespace exec_life_cycle_test {

const std::exception_ptr kError = std::make_exception_ptr(Error("broken"));

TEST(LifeCycle, ClosesOnce) {
  LifeCycle life;
  EXPECT_TRUE(life.begin_close());
  EXPECT_EQ(life.state(), Life::kFinishing);
  EXPECT_NO_THROW(life.require_alive());
  EXPECT_FALSE(life.begin_close());
  life.begin_goodbye();
  EXPECT_THROW(life.require_alive(), Aborted);
  EXPECT_FALSE(life.begin_close());
  life.end();
  EXPECT_TRUE(life.has_ended());
  EXPECT_FALSE(life.begin_close());
}

TEST(LifeCycle, ThrowsItsFailureAndIsClosedAllTheSame) {
  LifeCycle life;
  life.fail(kError);
  EXPECT_EQ(life.state(), Life::kFailed);
  EXPECT_TRUE(life.begin_close());
  EXPECT_EQ(life.state(), Life::kEnding);
  EXPECT_FALSE(life.begin_close());
  life.end();
  EXPECT_THROW(life.require_alive(), Error);
}

TEST(LifeCycle, AFailureWhileAThreadClosesLeavesTheClosingToThatThread) {
  for (const bool says_goodbye : {false, true}) {
    LifeCycle life;
    EXPECT_TRUE(life.begin_close());
    if (says_goodbye) life.begin_goodbye();
    life.fail(kError);
    EXPECT_EQ(life.state(), Life::kEnding);
    EXPECT_FALSE(life.begin_close());
  }
}

TEST(LifeCycle, RefusesTransitionsThatItsTableHasNot) {
  LifeCycle life;
  EXPECT_THROW(life.begin_goodbye(), std::logic_error);
  EXPECT_THROW(life.end(), std::logic_error);
  EXPECT_EQ(life.state(), Life::kOpen);
  life.begin_close();
  EXPECT_THROW(life.end(), std::logic_error) << "its calls are not over";
  life.begin_goodbye();
  EXPECT_THROW(life.begin_goodbye(), std::logic_error);
  life.end();
  EXPECT_THROW(life.fail(kError), std::logic_error);
  EXPECT_EQ(life.failure(), nullptr) << "what is refused changes nothing";
  EXPECT_THROW(life.end(), std::logic_error);
  LifeCycle failed;
  failed.fail(kError);
  EXPECT_THROW(failed.fail(kError), std::logic_error);
  EXPECT_THROW(failed.begin_goodbye(), std::logic_error);
  EXPECT_THROW(failed.end(), std::logic_error) << "nobody has closed it";
}

TEST(LifeCycle, NeverGoesBack) {
  for (const auto& [from, to] : kTransitions) EXPECT_LT(from, to);
}

TEST(LifeCycle, IsAskedToFailOnce) {
  LifeCycle life;
  EXPECT_TRUE(life.ask_to_follow(kError));
  EXPECT_FALSE(life.ask_to_follow(kError));
  EXPECT_TRUE(life.ask_to_abort(kError));
  EXPECT_FALSE(life.ask_to_abort(kError));
  LifeCycle closing;
  closing.begin_close();
  closing.begin_goodbye();
  EXPECT_FALSE(closing.ask_to_follow(kError));
  EXPECT_TRUE(closing.ask_to_abort(kError)) << "ends the wait for others";
  LifeCycle failed;
  failed.fail(kError);
  EXPECT_FALSE(failed.ask_to_abort(kError));
}

TEST(Exclusive, OneHolderAtATime) {
  std::mutex mutex;
  std::unique_lock lock(mutex);
  Exclusive<int> value(7);
  EXPECT_EQ(*value.unless_taken(lock), 7);
  auto holder = value.take(lock);
  EXPECT_TRUE(value.taken(lock));
  EXPECT_EQ(value.unless_taken(lock), nullptr);
  *holder = 8;
  auto moved = std::move(holder);
  moved.give_back(lock);
  EXPECT_FALSE(value.taken(lock));
  EXPECT_EQ(*value.unless_taken(lock), 8);
}

}  // namespace exec_life_cycle_test
}  // namespace gradwire::exec
