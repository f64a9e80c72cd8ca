// LifeCycle: the state of a communicator from open to ended, and what ended it. The communicator's
// mutex guards it; only state() may be called without.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <iterator>
#include <stdexcept>
#include <utility>

#include "gradwire/base/error.h"

namespace gradwire::exec {

enum class Life : std::uint8_t {
  kOpen,       // takes calls
  kFinishing,  // takes calls, while a thread that closes waits until all are over
  kClosing,    // takes no more calls, and says goodbye to the other ranks
  kFailed,     // calls throw the failure
  kEnding,     // calls throw the failure, and a thread closes it
  kEnded,      // everything is released
};

// All transitions. Any other throws std::logic_error, and changes nothing.
inline constexpr std::pair<Life, Life> kTransitions[] = {
    {Life::kOpen, Life::kFinishing},     // close()
    {Life::kOpen, Life::kFailed},        // a failure
    {Life::kFinishing, Life::kClosing},  // all calls are over
    {Life::kFinishing, Life::kEnding},   // a failure
    {Life::kClosing, Life::kEnding},     // a failure
    {Life::kClosing, Life::kEnded},      // everything is released
    {Life::kFailed, Life::kEnding},      // close(), or its sockets are given away
    {Life::kEnding, Life::kEnded},       // everything is released
};

class LifeCycle {
 public:
  Life state() const noexcept { return state_; }
  bool takes_calls() const noexcept { return state_ <= Life::kFinishing; }
  bool has_ended() const noexcept { return state_ == Life::kEnded; }
  // Returns the failure; null: none. It is set once.
  const std::exception_ptr& failure() const noexcept { return failure_; }
  // Throws what ends every call: the failure, or Aborted after close().
  void require_alive() const {
    if (failure_) {
      unreported_ = false;
      std::rethrow_exception(failure_);
    }
    if (!takes_calls()) throw Aborted("this communicator is closed");
  }

  // Begins to close it. Returns false if another thread has begun.
  bool begin_close() {
    if (state_ != Life::kOpen && state_ != Life::kFailed) return false;
    move(failure_ ? Life::kEnding : Life::kFinishing);
    return true;
  }
  // Goes on to close it, when all calls are over.
  void begin_goodbye() { move(Life::kClosing); }
  void end() { move(Life::kEnded); }
  void fail(const std::exception_ptr& error) {
    const bool is_closing = state_ == Life::kFinishing || state_ == Life::kClosing;
    move(is_closing ? Life::kEnding : Life::kFailed);
    failure_ = error;
  }

  // Ask the driver to fail: for an abort, or because another communicator of the family failed.
  // Return false if it has failed or ended, or was asked before.
  bool ask_to_abort(const std::exception_ptr& error) noexcept {
    if (has_ended() || failure_ || abort_) return false;
    abort_ = error;
    return true;
  }
  bool ask_to_follow(const std::exception_ptr& error) noexcept {
    if (!takes_calls() || family_failure_) return false;
    family_failure_ = error;
    return true;
  }
  // Return with what the driver was asked to fail; null: nothing.
  const std::exception_ptr& abort() const noexcept { return abort_; }
  const std::exception_ptr& family_failure() const noexcept { return family_failure_; }

  // Whether the rest of the family is still to be failed.
  void require_family_failure(bool owed) noexcept { family_failure_due_ = owed; }
  bool take_family_failure_due() noexcept { return std::exchange(family_failure_due_, false); }
  bool family_failure_due() const noexcept { return family_failure_due_; }

  // Whether the failure is a mismatch of calls that was found outside of calls: the next call, or
  // close(), throws it.
  void set_unreported(bool unreported) noexcept { unreported_ = unreported; }
  bool unreported() const noexcept { return unreported_; }

 private:
  void move(Life to) {
    if (std::ranges::find(kTransitions, std::pair(state(), to)) == std::end(kTransitions))
      throw std::logic_error("a communicator cannot change its state so");
    state_ = to;
  }

  std::atomic<Life> state_{Life::kOpen};
  std::exception_ptr failure_, abort_, family_failure_;
  bool family_failure_due_ = false;
  mutable bool unreported_ = false;
};

}  // namespace gradwire::exec
