#include <gtest/gtest.h>

#include "gradwire/base/deadline.h"

namespace gradwire {
namespace base_deadline_test {

TEST(Deadline, HasNoTimeLeftOnceItHasPassed) {
  EXPECT_EQ(Deadline::at_once().milliseconds_left(50), 0);
  EXPECT_EQ(Deadline::at_once().earlier(1).milliseconds_left(50), 0);
  EXPECT_EQ(Deadline::after(-1).milliseconds_left(50), 0);
  EXPECT_TRUE(Deadline::at_once().earlier(1).passed());
}

TEST(Deadline, HasAtMostTheCapLeft) {
  EXPECT_EQ(Deadline::never().milliseconds_left(50), 50);
  EXPECT_EQ(Deadline::never().earlier(1).milliseconds_left(50), 50);
  EXPECT_EQ(Deadline::after(1e6).milliseconds_left(50), 50);
}

}  // namespace base_deadline_test
}  // namespace gradwire
