#include <atomic>
#include <chrono>
#include <thread>

#include "gradwire/base/deadline.h"
#include "gradwire/bind/module.h"

namespace gradwire::bind {
namespace {

// One count for the whole process, as there is one interpreter.
std::atomic<int> inside{0};

constexpr std::chrono::milliseconds kBetweenLooks{1};

}  // namespace

Unlocked::Unlocked() {
  ++inside;
  released_.emplace();
}

// Counts itself out only when it holds the GIL again.
Unlocked::~Unlocked() {
  released_.reset();
  --inside;
}

// Polls at intervals, which is enough for what runs once, at the end of a program.
void await_calls(double seconds) {
  const py::gil_scoped_release released;
  const Deadline deadline = Deadline::after(seconds);
  while (inside != 0 && !deadline.passed()) std::this_thread::sleep_for(kBetweenLooks);
}

// The threads that were inside exist only in the parent.
void forget_calls() { inside = 0; }

}  // namespace gradwire::bind
