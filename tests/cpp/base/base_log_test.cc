#include "gradwire/base/log.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <climits>
#include <string>

#include "gradwire/base/fd.h"

namespace gradwire {
namespace base_log_test {

// Standard error goes into a pipe for as long as it lives.
class Caught {
 public:
  Caught() : before_(::dup(STDERR_FILENO)) {
    int ends[2];
    EXPECT_EQ(::pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
    reader_.reset(ends[0]);
    writer_.reset(ends[1]);
    ::dup2(writer_.get(), STDERR_FILENO);
    ::fcntl(writer_.get(), F_SETFL, 0);  // as a program's standard error: writing may block
  }
  ~Caught() { ::dup2(before_.get(), STDERR_FILENO); }
  Caught(const Caught&) = delete;
  Caught& operator=(const Caught&) = delete;

  std::string read() {
    std::array<char, 8192> text{};
    const ssize_t got = ::read(reader_.get(), text.data(), text.size());
    return {text.data(), got > 0 ? static_cast<std::size_t>(got) : 0};
  }
  void close() { reader_.reset(); }

 private:
  UniqueFd before_, reader_, writer_;
};

TEST(Log, IsOneLine) {
  Caught caught;
  log_to_stderr("rank 1: it waits");
  EXPECT_EQ(caught.read(), "gradwire: rank 1: it waits\n");
}

TEST(Log, IsCutToWhatAPipeTakesWhole) {
  Caught caught;
  log_to_stderr(std::string(2 * PIPE_BUF, 'x'));
  const std::string text = caught.read();
  EXPECT_EQ(text.size(), static_cast<std::size_t>(PIPE_BUF));
  EXPECT_EQ(text.back(), '\n');
}

TEST(Log, NeverBlocksNorKills) {
  Caught caught;
  for (int i = 0; i < 100; ++i) log_to_stderr(std::string(PIPE_BUF, 'x'));  // more than fits
  EXPECT_EQ(caught.read().size(), 8192U);
  caught.close();
  log_to_stderr("nobody reads this");
}

}  // namespace base_log_test
}  // namespace gradwire
