// Work: one operation in flight. Shared between the driver, which finishes it, and whoever waits.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>

#include "gradwire/base/error.h"
#include "gradwire/base/types.h"

namespace gradwire::exec {

class Work {
 public:
  bool done() const noexcept { return done_; }

  // Sleeps until the operation is over or `seconds` have passed; true when it is over. Throws
  // nothing.
  bool wait_for(double seconds) const {
    std::unique_lock lock(mutex_);
    ++waiters_;
    const bool over = over_.wait_for(lock, std::chrono::duration<double>(seconds),
                                     [this] { return done_.load(); });
    --waiters_;
    return over;
  }

  // The error the operation ended with, rethrown; to be called when done.
  void rethrow() const {
    if (done_ && error_) std::rethrow_exception(error_);
  }

  // The rank that a recv's message came from, when done.
  Rank source() const noexcept { return done_ ? source_ : kNoPeer; }

  // Whoever waits counts itself and then looks; this says that it is over and then counts: one of
  // the two sees the other.
  void finish(std::exception_ptr error, Rank source = kNoPeer) noexcept {
    if (error) error_ = std::move(error);
    if (source != kNoPeer) source_ = source;
    done_ = true;
    if (waiters_ == 0) return;
    {
      const std::lock_guard lock(mutex_);
    }  // not between a waiter's look and its sleep
    over_.notify_all();
  }

  // Ready for another operation; only while nobody else holds it, and after no error, since that is
  // its communicator's end.
  void reuse() noexcept { done_ = false; }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable over_;
  std::atomic<bool> done_{false};  // finish() writes it after the two below
  mutable std::atomic<int> waiters_{0};
  std::exception_ptr error_;
  Rank source_ = kNoPeer;
};

}  // namespace gradwire::exec
