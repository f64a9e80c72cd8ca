// A thread that is always there, and makes one call at a time that may never return, such as one
// into NCCL or the driver.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

namespace gradwire::cuda {

// One thread at a time uses it.
class CallThread {
 public:
  // `into`: what it calls, for messages. `spin`: how long it looks for the next call before it
  // sleeps.
  explicit CallThread(const char* into, std::chrono::microseconds spin = {});
  // Waits a short time for a call under way, and then leaves it and its thread to themselves; so a
  // call may only use what it owns.
  ~CallThread();
  CallThread(const CallThread&) = delete;
  CallThread& operator=(const CallThread&) = delete;

  // Begins a call, which may not throw, after the last one is over.
  void begin(std::function<void()> call);
  // Returns whether the last call is over; what it has written can then be read.
  bool is_over() const noexcept;

 private:
  struct State;
  static void loop(State& state, std::chrono::microseconds spin);

  const char* const into_;
  const std::uint32_t forks_;
  const std::shared_ptr<State> state_;
  std::unique_ptr<std::thread> thread_;  // leaked in a fork, which does not have it
};

}  // namespace gradwire::cuda
