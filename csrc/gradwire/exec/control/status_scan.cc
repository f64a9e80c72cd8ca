#include "gradwire/exec/control/status_scan.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <array>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <sstream>

namespace gradwire::exec {
namespace {

using Visit = std::function<void(const std::string& name)>;

// Visits the numbered entries of a directory; none if it cannot be read, as when a process has
// ended.
void each_number_in(const std::string& directory, const Visit& visit) {
  const std::unique_ptr<DIR, int (*)(DIR*)> open(::opendir(directory.c_str()), ::closedir);
  if (!open) return;
  while (const dirent* entry = ::readdir(open.get()))
    if (entry->d_name[0] >= '0' && entry->d_name[0] <= '9') visit(entry->d_name);
}

std::string contents(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

bool is_own(const std::string& process) {
  struct stat info{};
  return ::stat(process.c_str(), &info) == 0 && info.st_uid == ::geteuid();
}

// Returns the state of a process. It follows the program's name, which is in parentheses and may
// hold any character.
char state_of(const std::string& process) {
  const std::string stat = contents(process + "/stat");
  const std::size_t end = stat.rfind(')');
  return end == std::string::npos || end + 2 >= stat.size() ? '?' : stat[end + 2];
}

// Returns whether a process has the number `pid` in its innermost namespace. A fork of it has
// another.
bool is_named(const std::string& process, int pid) {
  std::istringstream status(contents(process + "/status"));
  int innermost = 0;
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("NSpid:", 0) != 0) continue;
    std::istringstream numbers(line.substr(line.find(':') + 1));
    while (numbers >> innermost) continue;
  }
  return innermost == pid;
}

bool is_status_page(const std::string& descriptor) {
  const std::string wanted = std::string("/memfd:") + kStatusName + " (deleted)";
  std::array<char, 64> target{};
  const ssize_t length = ::readlink(descriptor.c_str(), target.data(), target.size());
  return length > 0 && std::string_view(target.data(), static_cast<std::size_t>(length)) == wanted;
}

void add_status_of(const std::string& pid, std::vector<RankStatus>& found) {
  const std::string process = "/proc/" + pid;
  if (!is_own(process)) return;
  each_number_in(process + "/fd", [&](const std::string& number) {
    const std::string descriptor = process + "/fd/" + number;
    if (!is_status_page(descriptor)) return;
    const UniqueFd memory(::open(descriptor.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
    if (!memory.valid()) return;
    const auto page = read_status(memory.get());
    if (page && is_named(process, page->pid))
      found.push_back({std::atoi(pid.c_str()), state_of(process), *page});
  });
}

std::string last_call(const StatusPage& page) {
  return page.current.calls == 0 ? "it has made no call yet"
                                 : "its last call was " + std::to_string(page.current.calls - 1);
}

std::string whom(const StatusPage& page) {
  if (page.peer() == kNoPeer) return page.activity() == Activity::kCall ? "" : " any rank";
  return " rank " + std::to_string(page.peer());
}

std::string doing(const RankStatus& rank) {
  const StatusPage& page = rank.page;
  if (page.activity() == Activity::kFailed) return "failed: " + page.spec();
  if (page.activity() == Activity::kOutside)
    return "has been outside gradwire for " + seconds_text(std::round(10 * rank.seconds()) / 10) +
           "; " + last_call(page);
  if (page.peer() == kNoPeer && page.activity() == Activity::kCall)
    return "is busy in " + operation_of(page);
  return "waits for" + whom(page) + " in " + operation_of(page);
}

}  // namespace

double RankStatus::seconds() const noexcept {
  const std::uint64_t now = coarse_now();
  return now < page.current.since ? 0 : static_cast<double>(now - page.current.since) / 1e9;
}

std::vector<RankStatus> ranks_on_this_host() {
  std::vector<RankStatus> found;
  each_number_in("/proc", [&](const std::string& pid) { add_status_of(pid, found); });
  return found;
}

std::string operation_of(const StatusPage& page) {
  const auto& now = page.current;
  const std::string spec = page.spec();
  if (page.activity() == Activity::kSend || page.activity() == Activity::kReceive)
    return spec + ", message " + std::to_string(now.message);
  if (page.activity() != Activity::kCall) return {};
  const std::string call = "call " + std::to_string(now.calls - 1);
  const std::string where = page.peer() == kNoPeer ? std::string()
                                                   : ", round " + std::to_string(now.round) +
                                                         ", segment " + std::to_string(now.segment);
  return (spec.empty() ? call : spec + ", " + call) + where;
}

std::string describe(const RankStatus& rank) {
  const std::string who = name_of(rank.page.rank) + " (process " + std::to_string(rank.pid) + ") ";
  if (!rank.stopped()) return who + doing(rank);
  return who + "is stopped (kill -CONT " + std::to_string(rank.pid) + " lets it go on)";
}

}  // namespace gradwire::exec
