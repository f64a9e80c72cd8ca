// Work: one operation in flight, shared by the driver, which finishes it, and those who wait.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>

#include "gradwire/base/error.h"
#include "gradwire/base/types.h"

namespace gradwire {

class Work {
 public:
  // Marks the operation, while this exists, as one for which a thread is blocked.
  class Waiter {
   public:
    explicit Waiter(Work& work) noexcept : work_(work) { ++work_.blocked_; }
    ~Waiter() { --work_.blocked_; }
    Waiter(const Waiter&) = delete;
    Waiter& operator=(const Waiter&) = delete;

   private:
    Work& work_;
  };

  bool done() const noexcept { return done_; }
  // Returns whether a Waiter exists, or set_awaited() was called.
  bool awaited() const noexcept { return blocked_ > 0; }
  // Marks the operation, for good, as one for which the program is blocked.
  void set_awaited() noexcept { ++blocked_; }

  // Sleeps until the operation is over or `seconds` have passed; returns true if it is over. Never
  // throws.
  bool wait_for(double seconds) const {
    std::unique_lock lock(mutex_);
    ++waiters_;
    const bool over = over_.wait_for(lock, std::chrono::duration<double>(seconds),
                                     [this] { return done_.load(); });
    --waiters_;
    return over;
  }

  // Rethrows the error with which the operation ended, if any. To be called when it is done.
  void rethrow() const {
    if (done_ && error_) std::rethrow_exception(error_);
  }

  // Returns the rank that a recv's message came from, when it is done.
  Rank source() const noexcept { return done_ ? source_ : kNoPeer; }

  // Ends the operation. Waiters count themselves, then read done_; this sets done_, then reads the
  // count: so one of the two sees the other.
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

  // Prepares for another operation. Only while nobody else holds it, and not after an error.
  void reuse() noexcept {
    done_ = false;
    blocked_ = 0;
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable over_;
  std::atomic<bool> done_{false};        // finish() writes it after error_ and source_
  mutable std::atomic<int> waiters_{0};  // in wait_for() at this moment
  std::atomic<int> blocked_{0};
  std::exception_ptr error_;
  Rank source_ = kNoPeer;
};

}  // namespace gradwire
