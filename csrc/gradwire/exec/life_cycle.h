// LifeCycle: how far a communicator's life has come, and what ended it.
//
//   from       to
//   open       finishing (close), failed
//   finishing  closing (all calls are over), ending (a failure)
//   closing    ending (a failure), ended
//   failed     ending (close, or its sockets are given away)
//   ending     ended
//
// Any other transition throws std::logic_error and changes nothing.
//
// Guarded by the communicator's mutex, but for state(), which any thread may read.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <utility>

#include "gradwire/base/error.h"

namespace gradwire::exec {

enum class Life : std::uint8_t {
  kOpen,       // takes calls
  kFinishing,  // takes calls, while a thread that closes waits for all that are pending
  kClosing,    // takes no more calls: the others are told
  kFailed,     // calls throw the failure
  kEnding,     // likewise, and a thread closes it
  kEnded,      // everything is released
};

// Returns whether the table has a transition.
constexpr bool leads(Life from, Life to) noexcept {
  switch (from) {
    case Life::kOpen:
      return to == Life::kFinishing || to == Life::kFailed;
    case Life::kFinishing:
      return to == Life::kClosing || to == Life::kEnding;
    case Life::kClosing:
      return to == Life::kEnding || to == Life::kEnded;
    case Life::kFailed:
      return to == Life::kEnding;
    case Life::kEnding:
      return to == Life::kEnded;
    case Life::kEnded:
      break;
  }
  return false;
}

class LifeCycle {
 public:
  Life state() const noexcept { return state_; }
  bool takes_calls() const noexcept { return state_ <= Life::kFinishing; }
  bool has_ended() const noexcept { return state_ == Life::kEnded; }
  // Returns what ended it; null: nothing has. It is set once.
  const std::exception_ptr& failure() const noexcept { return failure_; }
  // Throws what ends every call: the failure, or Aborted after close().
  void require_alive() const {
    if (failure_) {
      unreported_ = false;
      std::rethrow_exception(failure_);
    }
    if (!takes_calls()) throw Aborted("this communicator is closed");
  }

  // Begins to close it. Returns false where another thread does, or has.
  bool begin_close() {
    if (state_ != Life::kOpen && state_ != Life::kFailed) return false;
    move(failure_ ? Life::kEnding : Life::kFinishing);
    return true;
  }
  // All calls are over: the others are told.
  void begin_goodbye() { move(Life::kClosing); }
  void end() { move(Life::kEnded); }
  void fail(const std::exception_ptr& error) {
    const bool is_closing = state_ == Life::kFinishing || state_ == Life::kClosing;
    move(is_closing ? Life::kEnding : Life::kFailed);
    failure_ = error;
  }

  // Asks the driver to fail: for an abort, or as another communicator of the family did. Returns
  // false where it has failed or ended, or was asked already.
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
  // What was asked; null: nothing.
  const std::exception_ptr& abort() const noexcept { return abort_; }
  const std::exception_ptr& family_failure() const noexcept { return family_failure_; }

  // Whether the rest of the family must fail as this one did, and does not know yet.
  void owe_family(bool owed) noexcept { owes_family_ = owed; }
  bool take_family_debt() noexcept { return std::exchange(owes_family_, false); }
  bool owes_family() const noexcept { return owes_family_; }

  // Ranks made different calls, and this was found outside of any call: the next call, or close(),
  // throws it.
  void set_unreported(bool unreported) noexcept { unreported_ = unreported; }
  bool unreported() const noexcept { return unreported_; }

 private:
  void move(Life to) {
    if (!leads(state_, to)) throw std::logic_error("a communicator cannot change its state so");
    state_ = to;
  }

  std::atomic<Life> state_{Life::kOpen};
  std::exception_ptr failure_, abort_, family_failure_;
  bool owes_family_ = false;
  mutable bool unreported_ = false;
};

}  // namespace gradwire::exec
