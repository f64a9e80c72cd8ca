// How a communicator fails: by itself, by an abort, or with its family.
#include <chrono>
#include <utility>

#include "gradwire/base/error.h"
#include "gradwire/exec/control/failure.h"
#include "gradwire/exec/engine.h"

namespace gradwire::exec {

void Engine::abort(const std::string& reason, bool alone) noexcept {
  {
    const Lock lock(mutex);
    const Aborted error(reason, identity.rank, kNoPeer, alone);
    if (!life.ask_to_abort(std::make_exception_ptr(error))) return;
    fail_soon(lock);
  }
  fail_family();
}

void Engine::fail_as(const transport::ControlFrame& failure, const Identity& there) noexcept {
  const Lock lock(mutex);
  if (!life.ask_to_follow(error_of(translated(failure, there, identity)))) return;
  fail_soon(lock);
}

// Fails as it was asked to, at once or, if a thread drives, at its next step.
void Engine::fail_soon(const Lock& lock) noexcept {
  has_requests = true;
  if (Driver* idle = driver.unless_taken(lock)) fail_if_asked(*idle);
  wakeup.ring();
  changed.notify_all();
}

void Engine::fail_with(const std::exception_ptr& error) noexcept {
  Lock lock(mutex);
  if (!life.takes_calls()) return;
  if (changed.wait_for(lock, std::chrono::seconds(1), [&] { return !driver.taken(lock); })) {
    fail_locked(*driver.unless_taken(lock), error);
    changed.notify_all();
    lock.unlock();
    return fail_family();
  }
  lock.unlock();
  abort(transport::text_of(failure_frame(error, identity.rank)), /*alone=*/true);
}

Engine::Interrupt Engine::abort_or(const Interrupt& interrupt) {
  return [this, &interrupt] {
    {
      const std::lock_guard lock(mutex);
      if (life.abort()) std::rethrow_exception(life.abort());
      if (life.family_failure()) std::rethrow_exception(life.family_failure());
    }
    if (interrupt) Driver::call_interrupt(interrupt);
  };
}

std::exception_ptr Engine::fail_with_root_cause(Driver& holder, const std::exception_ptr& error,
                                                const Interrupt& interrupt) {
  try {
    std::rethrow_exception(holder.control.root_cause(error, abort_or(interrupt)));
  } catch (const Interruption& stopped) {
    fail(holder, std::make_exception_ptr(
                     Aborted(name_of(identity.rank) + " was interrupted", identity.rank)));
    return stopped.cause;
  } catch (...) {
    fail(holder, std::current_exception());
  }
  return nullptr;
}

void Engine::fail(Driver& holder, const std::exception_ptr& error) noexcept {
  {
    const std::lock_guard lock(mutex);
    fail_locked(holder, error);
  }
  fail_family();
}

// Whoever releases the mutex calls fail_family().
void Engine::fail_locked(Driver& holder, const std::exception_ptr& found) noexcept {
  if (life.failure() || life.has_ended()) return;
  const std::exception_ptr error = with_job_peer(found, identity);
  life.fail(error);
  if (family) family->set_wait(*this, kNoPeer);
  life.require_family_failure(family && !life.family_failure() &&
                              fails_family(failure_frame(error, identity.rank)));
  holder.fail(error);
}

// Does what other threads asked of the driver when it was about to leave.
void Engine::fail_if_asked(Driver& holder) noexcept {
  if (!life.takes_calls()) return;
  if (life.abort()) fail_locked(holder, life.abort());
  if (life.family_failure()) fail_locked(holder, life.family_failure());
}

// Does the same, and has the family fail. Releases the mutex meanwhile.
void Engine::handle_requests(Lock& lock, Driver& holder) {
  fail_if_asked(holder);
  if (!life.family_failure_due()) return;
  lock.unlock();
  fail_family();
  lock.lock();
}

// Has the rest of the family fail as this one did. Must be called without the mutex.
void Engine::fail_family() noexcept {
  std::exception_ptr error;
  {
    const std::lock_guard lock(mutex);
    if (!life.take_family_failure_due()) return;
    error = life.failure();
  }
  family->fail_others(*this, identity, failure_frame(error, identity.rank));
}

}  // namespace gradwire::exec
