#include "gradwire/cuda/call_thread.h"

#include <atomic>
#include <string>
#include <utility>

#include "gradwire/base/deadline.h"
#include "gradwire/base/fork.h"
#include "gradwire/base/log.h"

namespace gradwire::cuda {

struct CallThread::State {
  enum Phase : int { kIdle, kCalled, kEnding };
  std::atomic<int> phase = kIdle;
  std::atomic<bool> ended = false;
  std::function<void()> call;
};

CallThread::CallThread(const char* into, std::chrono::microseconds spin)
    : into_(into),
      forks_(forks()),
      state_(std::make_shared<State>()),
      thread_(std::make_unique<std::thread>([state = state_, spin] {
        loop(*state, spin);
        state->ended = true;
      })) {}

CallThread::~CallThread() {
  constexpr double kGraceSeconds = 1;
  if (forks() != forks_) {
    static_cast<void>(thread_.release());
    return;
  }
  state_->phase = State::kEnding;
  state_->phase.notify_one();
  for (const Deadline deadline = Deadline::after(kGraceSeconds); !state_->ended;) {
    if (deadline.passed()) {
      log_to_stderr("a call into " + std::string(into_) +
                    " does not return, and is left to itself");
      thread_->detach();
      return;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  thread_->join();
}

void CallThread::begin(std::function<void()> call) {
  state_->call = std::move(call);
  state_->phase = State::kCalled;
  state_->phase.notify_one();
}

bool CallThread::is_over() const noexcept { return state_->phase == State::kIdle; }

void CallThread::loop(State& state, std::chrono::microseconds spin) {
  for (;;) {
    const auto begun = Deadline::Clock::now();
    while (state.phase == State::kIdle && Deadline::Clock::now() - begun < spin)
      std::this_thread::yield();
    state.phase.wait(State::kIdle);
    int called = State::kCalled;
    if (state.phase != called) return;
    state.call();
    state.call = nullptr;
    if (!state.phase.compare_exchange_strong(called, State::kIdle)) return;
  }
}

}  // namespace gradwire::cuda
