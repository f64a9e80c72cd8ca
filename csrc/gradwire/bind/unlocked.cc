#include <chrono>
#include <condition_variable>
#include <mutex>

#include "gradwire/bind/module.h"

namespace gradwire::bind {
namespace {

// Of the whole process, as the interpreter is.
std::mutex mutex;
std::condition_variable left;
int inside = 0;

}  // namespace

Unlocked::Unlocked() {
  {
    std::lock_guard lock(mutex);
    ++inside;
  }
  released_.emplace();
}

// Counts itself out only when it holds the interpreter's lock again.
Unlocked::~Unlocked() {
  released_.reset();
  std::lock_guard lock(mutex);
  --inside;
  left.notify_all();
}

void await_calls(double seconds) {
  py::gil_scoped_release released;
  std::unique_lock lock(mutex);
  left.wait_for(lock, std::chrono::duration<double>(seconds), [] { return inside == 0; });
}

// The threads that were inside are the parent's.
void forget_calls() {
  std::lock_guard lock(mutex);
  inside = 0;
}

}  // namespace gradwire::bind
