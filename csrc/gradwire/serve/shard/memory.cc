#include "gradwire/serve/shard/memory.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <limits>

namespace gradwire::serve {
namespace {

constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();
// Of a container; cgroups(7), versions 2 and 1.
constexpr const char* kGroupLimits[] = {"/sys/fs/cgroup/memory.max",
                                        "/sys/fs/cgroup/memory/memory.limit_in_bytes"};

std::uint64_t number_in(const char* path) {
  std::uint64_t bytes = 0;
  std::ifstream file(path);
  return file >> bytes ? bytes : kUnlimited;  // "max" is no number
}

std::uint64_t memory_of_host() {
  const long pages = ::sysconf(_SC_PHYS_PAGES), size = ::sysconf(_SC_PAGESIZE);
  if (pages <= 0 || size <= 0) return kUnlimited;
  return static_cast<std::uint64_t>(pages) * static_cast<std::uint64_t>(size);
}

std::uint64_t limit_of_process() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return kUnlimited;
  return limit.rlim_cur;
}

// Asks for huge pages for what lies between two ordinary ones.
void use_huge_pages(void* memory, std::size_t bytes) noexcept {
  constexpr std::size_t kLeast = std::size_t{4} << 20;  // two huge pages, on most systems
  if (bytes < kLeast) return;
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(memory);
  const std::uintptr_t from = (begin + page - 1) / page * page, to = (begin + bytes) / page * page;
  ::madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
}

}  // namespace

std::uint64_t usable_memory() {
  std::uint64_t least = std::min(memory_of_host(), limit_of_process());
  for (const char* path : kGroupLimits) least = std::min(least, number_in(path));
  return least;
}

std::vector<float> make_words(std::size_t n, float initial) {
  std::vector<float> words;
  words.reserve(n);
  use_huge_pages(words.data(), n * sizeof(float));  // before they are touched
  words.resize(n, initial);
  return words;
}

std::string gibibytes(std::uint64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g GiB",
                static_cast<double>(bytes) / static_cast<double>(1U << 30));
  return text;
}

}  // namespace gradwire::serve
