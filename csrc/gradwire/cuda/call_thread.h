// CallThread: a thread that makes calls that may never return, such as those into NCCL or the
// driver, one at a time.
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
  // `into`: the name of what it calls, for the log; must outlive it. `spin`: for how long it looks
  // for the next call before it sleeps.
  explicit CallThread(const char* into, std::chrono::microseconds spin = {});
  // Waits a second for a call under way, then abandons it and its thread: so a call may use only
  // what it owns.
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
