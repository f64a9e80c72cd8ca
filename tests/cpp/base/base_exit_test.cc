#include "gradwire/base/exit.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>

// Watches exit(), which no exit handler may call.
extern "C" [[noreturn]] void exit(int status) noexcept {
  static bool called = false;
  if (std::exchange(called, true)) static_cast<void>(::write(STDERR_FILENO, "again ", 6));
  reinterpret_cast<void (*)(int)>(::dlsym(RTLD_NEXT, "exit"))(status);
  ::_exit(status);
}

namespace gradwire {
namespace base_exit_test {

void say_earlier() { static_cast<void>(::write(STDERR_FILENO, "earlier", 7)); }
void say_later() { static_cast<void>(::write(STDERR_FILENO, "later ", 6)); }

[[noreturn]] void end(int given) {
  std::atexit(say_earlier);
  end_with(7);
  std::atexit(say_later);
  std::exit(given);
}

TEST(ExitDeathTest, SuccessBecomesTheStatusAndAllHandlersRun) {
  EXPECT_EXIT(end(0), testing::ExitedWithCode(7), "^later earlier$");
}

TEST(ExitDeathTest, AnotherStatusStays) {
  EXPECT_EXIT(end(3), testing::ExitedWithCode(3), "^later earlier$");
}

}  // namespace base_exit_test
}  // namespace gradwire
