// What the progress thread does for a communicator: it drives work that no caller's thread waits
// for, and serves it between calls. Members' mutexes are taken before the thread's own.
#include <array>
#include <utility>

#include "gradwire/base/error.h"
#include "gradwire/base/spin.h"
#include "gradwire/exec/communicator.h"

namespace gradwire::exec {

void Communicator::start_progress_thread_locked() {
  if (stopped_) return;
  progress_->wake(*this);
  if (!std::exchange(started_, true)) progress_->serve(*this);
}

void Communicator::serve_soon_locked() {
  if (stopped_) return;
  progress_->serve(*this);
  started_ = true;
}

bool Communicator::take_over() {
  const std::lock_guard lock(mutex_);
  if (driving_ || is_idle()) return false;
  begin_driving_locked(nullptr);
  return true;
}

ProgressThread::Turn Communicator::turn() noexcept {
  if (turn_error_) return ProgressThread::Turn::kFailed;
  try {
    if (!finished(nullptr))
      return step_beside_others() ? ProgressThread::Turn::kMoved : ProgressThread::Turn::kIdle;
  } catch (...) {
    turn_error_ = std::current_exception();
    return ProgressThread::Turn::kFailed;
  }
  std::unique_lock lock(mutex_);
  end_driving(lock, /*hands_over=*/true);
  return ProgressThread::Turn::kOver;
}

// Moves what can move, and returns whether something did. Where nothing does for long this rank
// waits, also if those that share the thread keep it from sleep.
bool Communicator::step_beside_others() {
  if (step(nullptr)) {
    idle_turns_ = 0;
    return true;
  }
  if (++idle_turns_ % (spins_ + kYields + 1) == 0) note_wait();
  return false;
}

void Communicator::end_failed() noexcept {
  fail_with_root_cause(std::exchange(turn_error_, nullptr), nullptr);
  std::unique_lock lock(mutex_);
  end_driving(lock, /*hands_over=*/true);
}

int Communicator::before_sleep(std::vector<pollfd>& doorbells) noexcept {
  try {
    if (prepare_sleep(nullptr)) return -1;
    std::array<pollfd, kMostDoorbells> own;
    const std::size_t count = put_doorbells(own);
    doorbells.insert(doorbells.end(), own.begin(), own.begin() + static_cast<long>(count));
    return longest_sleep();
  } catch (...) {
    turn_error_ = std::current_exception();
  }
  return -1;
}

void Communicator::after_sleep() noexcept {
  try {
    empty_wakeup();
    disarm();
  } catch (...) {
    if (!turn_error_) turn_error_ = std::current_exception();
  }
}

// Lets the progress thread announce ended calls. Not all ranks get data from this one in every
// call, and a rank that closes waits until it knows that such a call is over here, while this rank
// may long be busy elsewhere.
void Communicator::announce_soon_locked() {
  if (!std::exchange(announces_, true)) serve_soon_locked();
}

// Announces ended calls. Where a peer could not be told because it has not read earlier frames, a
// later call tries again.
void Communicator::announce_ended_calls_locked() {
  if (driving_) return;  // the driver announces
  const bool alive = !failure_ && !closed_;
  if (alive && control_.has_unannounced_calls()) control_.announce();
  announces_ = alive && control_.has_unannounced_calls();
}

// Does the progress thread's work between calls: answers ranks that ask where this one is, however
// long its program is busy elsewhere. What ends the communicator is left to the next call, which
// may wait to learn the cause: the others of the thread do not.
bool Communicator::serve_between_calls() {
  std::unique_lock lock(mutex_);
  serve_locked();
  announce_ended_calls_locked();
  if (dropped_) settle_dropped(lock);
  return !failure_ && !closed_;
}

// After drop() no call will report a mismatch, so this logs it.
void Communicator::settle_dropped(std::unique_lock<std::mutex>& lock) {
  if (!driving_ && !failure_ && !closed_) poll_control(lock);
  if (driving_) return;
  dropped_ = !failure_ && !closed_ && control_.unsettled_peer() != kNoPeer;
  if (!unreported_) return;
  try {
    std::rethrow_exception(failure_);
  } catch (const Error& error) {
    log_(error.what());
  }
}

void Communicator::stop_progress_thread() {
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
    wake_driver();
  }
  progress_->leave(*this);
}

}  // namespace gradwire::exec
