// How a communicator ends: by abort, close or failure, or by giving its sockets to a smaller one.
#include <poll.h>

#include <algorithm>
#include <utility>

#include "gradwire/base/error.h"
#include "gradwire/exec/communicator.h"
#include "gradwire/exec/control/failure.h"
#include "gradwire/exec/engine.h"

namespace gradwire::exec {
namespace {

using Interrupt = WaitLimit::Interrupt;
using Lock = Engine::Lock;

// How long a rank that closes waits for others to close.
constexpr double kPeerCloseSeconds = 0.25;
// How long it waits for what was sent by a failing way to come by another one.
constexpr double kDeliverySeconds = 4;
constexpr int kDeliveryPollMilliseconds = 2;
// How long a peer that does not read may delay the last frames of a failed communicator.
constexpr double kLastWordSeconds = 1;
constexpr int kFailurePollMilliseconds = 50;

void abort_close(Engine& engine, bool interrupted, bool alone) noexcept {
  engine.abort(
      name_of(engine.identity.rank) +
          (interrupted ? " was interrupted" : " closed its communicator with work in flight"),
      alone);
}

// Waits until something is over, or the deadline. Returns what the interrupt threw, which ends the
// wait.
template <typename Over>
std::exception_ptr wait_until(Engine& engine, Lock& lock, Over over, const Deadline& deadline,
                              const Interrupt& interrupt) {
  while (!over() && !deadline.passed()) {
    engine.changed.wait_for(lock, std::chrono::milliseconds(deadline.milliseconds_left(100)));
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

// Waits until another thread has closed the communicator. Aborts what that thread waits for when it
// takes too long, or after an interrupt, whose error it throws.
void await_close(Engine& engine, Lock& lock, const Deadline& deadline, const Interrupt& interrupt,
                 bool alone) {
  const auto ended = [&] { return engine.life.has_ended(); };
  const auto interruption = wait_until(engine, lock, ended, deadline, interrupt);
  if (!ended()) {
    lock.unlock();
    abort_close(engine, interruption != nullptr, alone);
    lock.lock();
    engine.changed.wait(lock, ended);
  }
  if (interruption) std::rethrow_exception(interruption);
}

// Finishes pending work. Returns what the interrupt threw, which ends the wait.
std::exception_ptr finish_work(Engine& engine, Lock& lock, const Deadline& deadline,
                               const Interrupt& interrupt) {
  const auto over = [&] { return engine.life.failure() || engine.is_idle(lock); };
  if (!over()) engine.start_progress_thread();
  return wait_until(engine, lock, over, deadline, interrupt);
}

// Waits until the peers' hosts have what they were sent, where a way to them may have failed.
void deliver(Driver& driver) {
  const Deadline deadline = Deadline::after(kDeliverySeconds);
  while (!(driver.links.deliver() && driver.transfer_links.deliver()) && !deadline.passed())
    ::poll(nullptr, 0, kDeliveryPollMilliseconds);
}

// Closes with a BYE. The caller becomes the driver and releases the mutex; calls made meanwhile see
// a closed communicator. Returns what the interrupt threw.
std::exception_ptr close_gracefully(Engine& engine, Lock& lock, double confirm,
                                    const Interrupt& interrupt, bool alone) {
  engine.life.begin_goodbye();
  std::exception_ptr interruption;
  const auto say_goodbye = [&](Driver& driver) {
    try {
      deliver(driver);
      if (confirm <= 0) return driver.control.close_now(alone);
      driver.control.close_gracefully({Deadline::after(confirm), engine.abort_or(interrupt)},
                                      Deadline::after(std::min(confirm, kPeerCloseSeconds)), alone);
    } catch (const Interruption& stopped) {  // the BYE is sent: only the wait for others ends
      interruption = stopped.cause;
    } catch (const Aborted&) {  // another thread aborted: the same
    } catch (const Timeout&) {  // only this rank fails: a late rank can still finish its calls
      const std::lock_guard again(engine.mutex);
      engine.life.fail(with_job_peer(std::current_exception(), engine.identity));
    }
  };
  const auto thrown = engine.as_driver(lock, interrupt, say_goodbye);
  return thrown ? thrown : interruption;
}

// Releases everything, when the driver, a thread that is about to see the end, has left.
void release(Engine& engine) {
  if (engine.family) engine.family->leave(engine);
  engine.stop_progress_thread();
  Lock lock(engine.mutex);
  engine.changed.wait(lock, [&] { return !engine.driver.taken(lock); });
  engine.life.end();
  Driver& driver = *engine.driver.unless_taken(lock);
  driver.close();
  engine.wakeup.close();
  driver.liveness.stalls.status().release();
  engine.changed.notify_all();
}

}  // namespace

void Communicator::abort(const std::string& reason, bool alone) noexcept {
  engine_->abort(reason, alone);
}

void Communicator::fail_with(const std::exception_ptr& error) noexcept {
  engine_->fail_with(error);
}

void Communicator::close(double timeout, double confirm, const Interrupt& interrupt, bool alone) {
  const Deadline deadline = Deadline::after(timeout);
  LifeCycle& life = engine_->life;
  Lock lock(engine_->mutex);
  const bool was_alive = !life.failure();
  if (!life.begin_close())
    return await_close(*engine_, lock, Deadline::after(timeout + confirm), interrupt, alone);
  std::exception_ptr interruption = finish_work(*engine_, lock, deadline, interrupt);
  const bool cleanly = !interruption && !life.failure() && engine_->is_idle(lock);
  if (cleanly) interruption = close_gracefully(*engine_, lock, confirm, interrupt, alone);
  lock.unlock();
  if (!cleanly) abort_close(*engine_, interruption != nullptr, alone);
  release(*engine_);
  if (interruption) std::rethrow_exception(interruption);
  const bool is_news = was_alive || life.unreported();
  if (is_news && life.failure() && !life.abort()) std::rethrow_exception(life.failure());
}

void Communicator::close(double timeout, const Interrupt& interrupt) {
  close(timeout, timeout, interrupt);
}

bool Communicator::is_confirmed() {
  const LifeCycle& life = engine_->life;
  Lock lock(engine_->mutex);
  if (!engine_->calls.empty()) return true;  // begun or not, so that no race decides
  if (life.takes_calls() && !engine_->driver.taken(lock)) engine_->poll_control(lock);
  if (life.unreported() && !life.has_ended()) return false;
  const Driver* idle = engine_->driver.unless_taken(lock);
  return !life.takes_calls() || (idle != nullptr && idle->control.unconfirmed_peer() == kNoPeer);
}

void Communicator::drop() {
  const std::lock_guard lock(engine_->mutex);
  engine_->dropped = true;
  engine_->serve_soon();
}

bool Communicator::closed() const {
  const std::lock_guard lock(engine_->mutex);
  return !engine_->life.takes_calls();
}

void Communicator::check_failure(double seconds) {
  const Deadline deadline = Deadline::after(seconds);
  Lock lock(engine_->mutex);
  for (;;) {
    engine_->life.require_alive();
    if (!engine_->driver.taken(lock)) engine_->poll_control(lock);  // otherwise the driver polls
    engine_->life.require_alive();
    if (deadline.passed()) return;
    engine_->changed.wait_for(
        lock, std::chrono::milliseconds(deadline.milliseconds_left(kFailurePollMilliseconds)));
  }
}

std::vector<std::pair<Rank, transport::Released>> Communicator::release_controls() {
  LifeCycle& life = engine_->life;
  Lock lock(engine_->mutex);
  if (life.takes_calls() && !life.abort())
    throw InvalidArgument("this communicator has not failed: to leave it all the same, abort() it");
  engine_->changed.wait(lock, [&] { return !engine_->driver.taken(lock); });
  if (!life.begin_close()) throw Aborted("this communicator is closed");
  Engine::Holder holder = engine_->driver.take(lock);
  lock.unlock();
  std::vector<std::pair<Rank, transport::Released>> released;
  for (Rank peer = 0; peer < engine_->identity.size; ++peer)
    for (auto& each : holder->control.sockets().release(peer, kLastWordSeconds))
      released.emplace_back(peer, std::move(each));
  lock.lock();
  holder.give_back(lock);
  lock.unlock();
  release(*engine_);
  return released;
}

void Communicator::release_after_fork() noexcept {
  Driver& driver = engine_->driver.after_fork();
  driver.close();
  driver.liveness.stalls.status().release_after_fork();
  engine_->wakeup.close();
}

}  // namespace gradwire::exec
