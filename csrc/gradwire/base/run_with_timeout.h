// Runs a call that may never return, such as one into a hung driver, on its own thread.
#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <thread>
#include <utility>

namespace gradwire {

// Returns whether `call` finished within `seconds`. If it did not, its thread is detached and goes
// on. Exceptions of `call` are dropped.
inline bool run_with_timeout(double seconds, std::function<void()> call) {
  std::packaged_task<void()> task(std::move(call));
  const std::future<void> over = task.get_future();
  std::thread thread(std::move(task));
  const bool in_time =
      over.wait_for(std::chrono::duration<double>(seconds)) == std::future_status::ready;
  in_time ? thread.join() : thread.detach();
  return in_time;
}

}  // namespace gradwire
