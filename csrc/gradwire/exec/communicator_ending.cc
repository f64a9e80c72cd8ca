// How a communicator ends: by abort, close or failure, or by giving its sockets to a smaller one.
#include "gradwire/exec/communicator.h"

#include <algorithm>
#include <utility>

#include "gradwire/base/error.h"
#include "gradwire/exec/control/failure.h"

namespace gradwire::exec {
namespace {

// How long a rank that closes waits for others to close.
constexpr double kPeerCloseSeconds = 0.25;
// How long a peer that does not read may delay the last frames of a failed communicator.
constexpr double kLastWordSeconds = 1;
constexpr int kFailurePollMilliseconds = 50;

}  // namespace

void Communicator::abort(const std::string& reason, bool alone) noexcept {
  {
    std::lock_guard lock(mutex_);
    if (ended_ || failure_ || abort_requested_) return;
    abort_requested_ = true;
    abort_reason_ = reason;
    aborts_alone_ = alone;
    has_requests_ = true;
    if (!driving_) fail_if_requested_locked();
    wake_driver();
  }
  changed_.notify_all();
  fail_family();
}

Aborted Communicator::aborted() const {
  return Aborted(abort_reason_, identity_.rank, kNoPeer, aborts_alone_);
}

// Does what other threads asked of the driver when it was about to leave.
void Communicator::fail_if_requested_locked() noexcept {
  if (closed_) return;
  if (abort_requested_) fail_locked(std::make_exception_ptr(aborted()));
  if (family_failure_) fail_locked(family_failure_);
}

// Does the same, and has the family fail. Releases the mutex meanwhile.
void Communicator::settle_requests(std::unique_lock<std::mutex>& lock) {
  fail_if_requested_locked();
  if (!family_must_fail_) return;
  lock.unlock();
  fail_family();
  lock.lock();
}

void Communicator::fail_as(const transport::ControlFrame& failure, const Identity& there) noexcept {
  const std::lock_guard lock(mutex_);
  if (ended_ || closed_ || failure_ || family_failure_) return;
  family_failure_ = error_of(crossed(failure, there, identity_));
  has_requests_ = true;
  if (!driving_) fail_if_requested_locked();
  wake_driver();
  changed_.notify_all();
}

// Has the rest of the family fail as this one did. Must be called without the mutex.
void Communicator::fail_family() noexcept {
  std::exception_ptr error;
  {
    const std::lock_guard lock(mutex_);
    if (!std::exchange(family_must_fail_, false)) return;
    error = failure_;
  }
  family_->fail_others(*this, identity_, failure_frame(error, identity_.rank));
}

void Communicator::close(double timeout, double settle, const Interrupt& interrupt, bool alone) {
  const Deadline deadline = Deadline::after(timeout);
  std::unique_lock lock(mutex_);
  if (std::exchange(ending_, true))
    return await_close(lock, Deadline::after(timeout + settle), interrupt, alone);
  const bool was_alive = !failure_;
  finishes_ = true;
  std::exception_ptr interruption = finish_work(lock, deadline, interrupt);
  const bool cleanly = !interruption && !failure_ && is_idle();
  if (cleanly) interruption = close_gracefully(lock, settle, interrupt, alone);
  lock.unlock();
  if (!cleanly) abort_close(interruption != nullptr, alone);
  release();
  if (interruption) std::rethrow_exception(interruption);
  const bool is_news = was_alive || unreported_;
  if (is_news && failure_ && !abort_requested_) std::rethrow_exception(failure_);
}

// Waits until another thread has closed the communicator. Aborts what that thread waits for when it
// takes too long, or after an interrupt, whose error it throws.
void Communicator::await_close(std::unique_lock<std::mutex>& lock, const Deadline& deadline,
                               const Interrupt& interrupt, bool alone) {
  const auto interruption = wait_until(lock, [this] { return ended_; }, deadline, interrupt);
  if (!ended_) {
    lock.unlock();
    abort_close(interruption != nullptr, alone);
    lock.lock();
    changed_.wait(lock, [this] { return ended_; });
  }
  if (interruption) std::rethrow_exception(interruption);
}

void Communicator::abort_close(bool interrupted, bool alone) noexcept {
  abort("rank " + std::to_string(identity_.rank) +
            (interrupted ? " was interrupted" : " closed its communicator with work in flight"),
        alone);
}

void Communicator::release() {
  if (family_) family_->leave(*this);
  stop_progress_thread();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !driving_; });  // a caller's thread, about to see the abort
  closed_ = ended_ = true;
  links_ = Links({});
  transfer_links_ = Links({});
  control_.close_all();
  wakeup_.reset();
  stall_monitor_.release();
  changed_.notify_all();
}

bool Communicator::is_idle() const {
  return !driving_ && queue_.empty() && submitted_.empty() && transfers_.idle();
}

// Finishes pending work. Returns what the interrupt threw, which ends the wait.
std::exception_ptr Communicator::finish_work(std::unique_lock<std::mutex>& lock,
                                             const Deadline& deadline, const Interrupt& interrupt) {
  const auto over = [this] { return failure_ || is_idle(); };
  if (!over()) start_progress_thread_locked();
  return wait_until(lock, over, deadline, interrupt);
}

// Waits until something is over, or the deadline. Returns what the interrupt threw, which ends the
// wait.
template <typename Over>
std::exception_ptr Communicator::wait_until(std::unique_lock<std::mutex>& lock, Over over,
                                            const Deadline& deadline, const Interrupt& interrupt) {
  while (!over() && !deadline.passed()) {
    changed_.wait_for(lock, std::chrono::milliseconds(deadline.milliseconds_left(100)));
    if (!interrupt) continue;
    lock.unlock();
    try {
      interrupt();
    } catch (...) {
      lock.lock();
      return std::current_exception();
    }
    lock.lock();
  }
  return nullptr;
}

// Closes with a BYE. The caller becomes the driver and releases the mutex; calls made meanwhile see
// a closed communicator. Returns what the interrupt threw.
std::exception_ptr Communicator::close_gracefully(std::unique_lock<std::mutex>& lock, double settle,
                                                  const Interrupt& interrupt, bool alone) {
  driving_ = closed_ = true;
  lock.unlock();
  std::exception_ptr interruption;
  try {
    if (settle > 0)
      control_.close_gracefully({Deadline::after(settle), abort_or(interrupt)},
                                Deadline::after(std::min(settle, kPeerCloseSeconds)), alone);
    else
      control_.close_now(alone);
  } catch (const Interruption& stopped) {  // the BYE is sent: only the wait for others ends
    interruption = stopped.cause;
  } catch (const Aborted&) {  // another thread aborted: the same
  } catch (const Timeout&) {  // only this rank fails: a late rank can still finish its calls
    const std::lock_guard again(mutex_);
    failure_ = with_job_peer(std::current_exception(), identity_);
  } catch (...) {
    interruption = fail_with_root_cause(std::current_exception(), interrupt);
  }
  lock.lock();
  stop_driving_locked();
  return interruption;
}

bool Communicator::settled() {
  std::unique_lock lock(mutex_);
  if (!queue_.empty()) return true;  // whether they have begun or not, so that no race decides
  if (!failure_ && !closed_ && !driving_) poll_control(lock);
  if (unreported_ && !closed_) return false;
  return failure_ || closed_ || (!driving_ && control_.unsettled_peer() == kNoPeer);
}

void Communicator::drop() {
  const std::lock_guard lock(mutex_);
  dropped_ = true;
  serve_soon_locked();
}

void Communicator::check_failure(double seconds) {
  const Deadline deadline = Deadline::after(seconds);
  std::unique_lock lock(mutex_);
  for (;;) {
    require_alive();
    if (!driving_) poll_control(lock);  // otherwise the driver polls
    require_alive();
    if (deadline.passed()) return;
    changed_.wait_for(
        lock, std::chrono::milliseconds(deadline.milliseconds_left(kFailurePollMilliseconds)));
  }
}

void Communicator::fail_with(const std::exception_ptr& error) noexcept {
  std::unique_lock lock(mutex_);
  if (failure_ || closed_) return;
  if (changed_.wait_for(lock, std::chrono::seconds(1), [this] { return !driving_; })) {
    fail_locked(error);
    changed_.notify_all();
    lock.unlock();
    return fail_family();
  }
  lock.unlock();
  abort(transport::text_of(failure_frame(error, identity_.rank)));
}

// Polls the control sockets. The caller becomes the driver and releases the mutex.
void Communicator::poll_control(std::unique_lock<std::mutex>& lock) {
  driving_ = true;
  lock.unlock();
  try {
    control_.poll();
  } catch (...) {
    fail_with_root_cause(std::current_exception(), nullptr);
  }
  lock.lock();
  settle_requests(lock);
  unreported_ = failure_ && failure_frame(failure_, identity_.rank).kind ==
                                transport::FailureKind::kInvalidArgument;
  stop_driving_locked();
}

std::vector<std::pair<Rank, transport::Released>> Communicator::release_controls() {
  std::unique_lock lock(mutex_);
  if (!closed_ && !failure_ && !abort_requested_)
    throw InvalidArgument("this communicator has not failed: to leave it all the same, abort() it");
  changed_.wait(lock, [this] { return !driving_; });
  if (std::exchange(ending_, true)) throw Aborted("this communicator is closed");
  driving_ = closed_ = true;
  lock.unlock();
  std::vector<std::pair<Rank, transport::Released>> released;
  for (Rank peer = 0; peer < identity_.size; ++peer)
    if (auto each = control_.release(peer, kLastWordSeconds))
      released.emplace_back(peer, std::move(*each));
  lock.lock();
  driving_ = false;
  lock.unlock();
  release();
  return released;
}

void Communicator::release_after_fork() noexcept {
  links_ = Links({});
  transfer_links_ = Links({});
  control_.close_all();
  stall_monitor_.release_after_fork();
  wakeup_.reset();
}

// Returns an interrupt that throws also if this communicator was aborted.
Communicator::Interrupt Communicator::abort_or(const Interrupt& interrupt) {
  return [this, &interrupt] {
    {
      std::lock_guard lock(mutex_);
      if (abort_requested_) throw aborted();
      if (family_failure_) std::rethrow_exception(family_failure_);
    }
    if (interrupt) call_interrupt(interrupt);
  };
}

// Fails the communicator with the root cause of `error`. If that is an interrupt, returns what it
// threw. Only the driver may call it.
std::exception_ptr Communicator::fail_with_root_cause(const std::exception_ptr& error,
                                                      const Interrupt& interrupt) {
  try {
    std::rethrow_exception(control_.root_cause(error, abort_or(interrupt)));
  } catch (const Interruption& stopped) {
    fail(std::make_exception_ptr(
        Aborted("rank " + std::to_string(identity_.rank) + " was interrupted", identity_.rank)));
    return stopped.cause;
  } catch (...) {
    fail(std::current_exception());
  }
  return nullptr;
}

void Communicator::fail(const std::exception_ptr& error) noexcept {
  {
    std::lock_guard lock(mutex_);
    fail_locked(error);
  }
  fail_family();
}

// May be called only while nobody drives, or by the driver itself: it changes the driver's state.
// Whoever releases the mutex calls fail_family().
void Communicator::fail_locked(const std::exception_ptr& found) noexcept {
  if (failure_) return;
  const std::exception_ptr error = with_job_peer(found, identity_);
  const transport::ControlFrame failure = failure_frame(error, identity_.rank);
  failure_ = error;
  if (family_) family_->set_wait(*this, kNoPeer);
  family_must_fail_ = family_ && !family_failure_ && crosses(failure);
  control_.say_failure(failure);
  stall_monitor_.set_failed(transport::text_of(failure));
  if (std::exchange(current_, nullptr) != nullptr && observer_) observer_->ended(error);
  for (auto& each : queue_) {
    each->settle();
    each->work->finish(error);
  }
  queue_.clear();
  front_ = nullptr;
  transfers_.fail(error);
  for (auto& [transfer, sends] : submitted_) transfer.work->finish(error);
  submitted_.clear();
}

}  // namespace gradwire::exec
