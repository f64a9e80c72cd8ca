#include "gradwire/base/fork.h"

#include <pthread.h>

#include <atomic>

namespace gradwire {
namespace {

std::atomic<std::uint32_t> count{0};

void count_in_child() { count.fetch_add(1, std::memory_order_relaxed); }

const bool counting = ::pthread_atfork(nullptr, nullptr, &count_in_child) == 0;

}  // namespace

std::uint32_t forks() noexcept { return count.load(std::memory_order_relaxed); }

}  // namespace gradwire
