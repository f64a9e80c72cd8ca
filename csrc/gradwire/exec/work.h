// Work: one operation in flight. Shared between the engine, which finishes it, and whoever waits.
#pragma once

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>

#include "gradwire/base/deadline.h"
#include "gradwire/base/types.h"

namespace gradwire::exec {

class Work {
 public:
  bool done() const {
    std::lock_guard lock(mutex_);
    return done_;
  }

  // Sleeps until the operation is over or `seconds` have passed; true when it is over. Throws
  // nothing.
  bool wait_for(double seconds) const {
    std::unique_lock lock(mutex_);
    return over_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return done_; });
  }

  // The error the operation ended with, rethrown; to be called when done.
  void rethrow() const {
    std::lock_guard lock(mutex_);
    if (error_) std::rethrow_exception(error_);
  }

  // Of a recv: the rank it came from.
  Rank source() const {
    std::lock_guard lock(mutex_);
    return source_;
  }

  void finish(std::exception_ptr error, Rank source = -1) noexcept {
    {
      std::lock_guard lock(mutex_);
      done_ = true;
      error_ = std::move(error);
      source_ = source;
    }
    over_.notify_all();
  }

  // Ready for another operation; only while nobody else holds it.
  void reuse() noexcept {
    std::lock_guard lock(mutex_);  // orders this after the last look of whoever held it
    done_ = false;
    error_ = nullptr;
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable over_;
  bool done_ = false;
  std::exception_ptr error_;
  Rank source_ = -1;
};

}  // namespace gradwire::exec
