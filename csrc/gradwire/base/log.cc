#include "gradwire/base/log.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <climits>

namespace gradwire {

void log_to_stderr(std::string_view line) noexcept {
  constexpr std::string_view kPrefix = "gradwire: ";
  std::array<char, PIPE_BUF> text;  // a pipe takes so many bytes in one piece
  line = line.substr(0, text.size() - kPrefix.size() - 1);
  char* end = std::copy(kPrefix.begin(), kPrefix.end(), text.data());
  end = std::copy(line.begin(), line.end(), end);
  *end++ = '\n';
  pollfd room{STDERR_FILENO, POLLOUT, 0};
  if (::poll(&room, 1, 0) != 1 || room.revents != POLLOUT) return;
  [[maybe_unused]] const ssize_t written =
      ::write(STDERR_FILENO, text.data(), static_cast<std::size_t>(end - text.data()));
}

}  // namespace gradwire
