// What the progress thread does for a communicator: it drives work that no caller's thread waits
// for, and serves it between calls.
#include <array>
#include <utility>

#include "gradwire/base/error.h"
#include "gradwire/base/spin.h"
#include "gradwire/exec/control/failure.h"
#include "gradwire/exec/engine.h"

namespace gradwire::exec {

void Engine::start_progress_thread() {
  if (service_ == Service::kLeft) return;
  progress_->wake(*this);
  if (std::exchange(service_, Service::kServed) == Service::kNone) progress_->serve(*this);
}

void Engine::start_progress_thread_once() {
  if (service_ == Service::kNone) start_progress_thread();
}

void Engine::serve_soon() {
  if (service_ == Service::kLeft) return;
  progress_->serve(*this);
  service_ = Service::kServed;
}

void Engine::stop_progress_thread() {
  {
    const std::lock_guard lock(mutex);
    service_ = Service::kLeft;
    wakeup.ring();
  }
  progress_->leave(*this);
}

bool Engine::take_over() {
  const Lock lock(mutex);
  if (driver.taken(lock) || is_idle(lock)) return false;
  turns_ = driver.take(lock);
  turns_->begin(nullptr);
  return true;
}

ProgressThread::Turn Engine::turn() noexcept {
  if (turns_->turn_error) return ProgressThread::Turn::kFailed;
  try {
    if (!turns_->finished(nullptr))
      return turns_->step_beside_others() ? ProgressThread::Turn::kMoved
                                          : ProgressThread::Turn::kIdle;
  } catch (...) {
    turns_->turn_error = std::current_exception();
    return ProgressThread::Turn::kFailed;
  }
  Lock lock(mutex);
  give_back(lock, std::move(turns_));
  return ProgressThread::Turn::kOver;
}

void Engine::end_failed() noexcept {
  fail_with_root_cause(*turns_, std::exchange(turns_->turn_error, nullptr), nullptr);
  Lock lock(mutex);
  give_back(lock, std::move(turns_));
}

int Engine::before_sleep(std::vector<pollfd>& doorbells) noexcept {
  try {
    if (turns_->prepare_sleep(nullptr)) return -1;
    std::array<pollfd, Driver::kMostDoorbells> own;
    const std::size_t count = turns_->put_doorbells(own);
    doorbells.insert(doorbells.end(), own.begin(), own.begin() + static_cast<long>(count));
    return turns_->longest_sleep();
  } catch (...) {
    turns_->turn_error = std::current_exception();
  }
  return -1;
}

void Engine::after_sleep() noexcept {
  try {
    wakeup.clear();
    turns_->disarm();
  } catch (...) {
    if (!turns_->turn_error) turns_->turn_error = std::current_exception();
  }
}

// Lets the progress thread announce ended calls. Not all ranks get data from this one in every
// call, and a rank that closes waits until it knows that such a call is over here, while this rank
// may be outside of gradwire for long.
void Engine::announce_soon() {
  if (!std::exchange(announces_, true)) serve_soon();
}

bool Engine::serve() {
  const Lock lock(mutex, std::try_to_lock);
  Driver* idle = lock ? driver.unless_taken(lock) : nullptr;
  return idle != nullptr && life.takes_calls() && idle->liveness.serve();
}

// Answers ranks that ask where this one is, however long its program is outside of gradwire, and
// announces ended calls; where a peer has not read earlier frames, a later turn tries again. What
// ends the communicator is left to the next call, which may wait to learn the cause: the thread's
// other communicators do not wait for that.
bool Engine::serve_between_calls() {
  Lock lock(mutex);
  if (Driver* idle = driver.unless_taken(lock)) {  // otherwise the driver does this
    const bool alive = life.takes_calls();
    if (alive) idle->liveness.serve();
    if (alive && idle->control.has_unannounced_calls()) idle->control.announce();
    announces_ = alive && idle->control.has_unannounced_calls();
  }
  if (dropped) check_dropped(lock);
  return life.takes_calls();
}

// After Communicator::drop() no call will report a mismatch, so this logs it.
void Engine::check_dropped(Lock& lock) {
  if (!driver.taken(lock) && life.takes_calls()) poll_control(lock);
  const Driver* idle = driver.unless_taken(lock);
  if (idle == nullptr) return;
  dropped = life.takes_calls() && idle->control.unconfirmed_peer() != kNoPeer;
  if (!life.unreported()) return;
  try {
    std::rethrow_exception(life.failure());
  } catch (const Error& error) {
    log(error.what());
  }
}

void Engine::poll_control(Lock& lock) {
  as_driver(lock, nullptr, [](Driver& holder) { holder.control.poll(); });
  const std::exception_ptr& failure = life.failure();
  life.set_unreported(failure && failure_frame(failure, identity.rank).kind ==
                                     transport::FailureKind::kInvalidArgument);
}

}  // namespace gradwire::exec
