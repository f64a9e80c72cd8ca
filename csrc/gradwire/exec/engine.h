// Engine: a communicator's state, its queue of calls, and the choice of who drives them: a caller's
// thread or the progress thread, one at a time. A call is bound to its plan on the caller's thread,
// under the mutex, so that invalid arguments throw there, before anything is sent.
//
// Only the files of exec/ use it. The mutex guards all members that are neither atomic nor const
// nor used only at set-up; the Driver has an owner of its own (exclusive.h). A thread that takes
// the progress thread's mutex, too, takes this one first.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "gradwire/base/bell.h"
#include "gradwire/exec/call_queue.h"
#include "gradwire/exec/control/awaited_senders.h"
#include "gradwire/exec/control/family.h"
#include "gradwire/exec/control/identity.h"
#include "gradwire/exec/driver.h"
#include "gradwire/exec/exclusive.h"
#include "gradwire/exec/life_cycle.h"
#include "gradwire/exec/plan/plan_cache.h"
#include "gradwire/exec/progress_thread.h"
#include "gradwire/exec/tuning.h"

namespace gradwire::exec {

// Requests to stop the job, or for a new communicator (resize).
struct StopRequests {
  std::shared_ptr<const StopRequest> process;  // null: none
  StopRequest own, resize;

  bool stop_requested() const noexcept { return own.made() || (process && process->made()); }
};

class Engine final : public Family::Member, public ProgressThread::Task {
 public:
  using Interrupt = WaitLimit::Interrupt;
  using Lock = std::unique_lock<std::mutex>;
  using Holder = Exclusive<Driver>::Holder;
  static constexpr unsigned kNoIdleLimit = ~0U;

  Engine(Identity identity, const Tuning& tuning);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // ---- Calls. Functions that take a lock want the mutex held, and may release it meanwhile. ----
  std::shared_ptr<Work> enqueue(Lock& lock, const Request& given);
  std::shared_ptr<Work> enqueue_transfer(Transfer transfer, bool sends);
  void bind_operation(Pending& pending, const Request& request);
  // Drives until `until` is over; or, where `most_idle` is given, until so many steps in a row have
  // moved nothing, and without sleep. Calls `slow` before it looks for the rank that failed.
  void drive(Lock& lock, const Work* until, const Interrupt& interrupt,
             unsigned most_idle = kNoIdleLimit, const std::function<void()>& slow = nullptr);
  // Has the calling thread run `drives` as the driver, without the mutex. Fails with the root cause
  // of what that throws, after a call of `slow`; if an interrupt threw it, returns what that threw.
  template <typename Drives>
  std::exception_ptr as_driver(Lock& lock, const Interrupt& interrupt, const Drives& drives,
                               bool hands_over = true,
                               const std::function<void()>& slow = nullptr) {
    Holder holder = driver.take(lock);
    lock.unlock();
    std::exception_ptr interruption;
    try {
      drives(*holder);
    } catch (...) {
      if (slow) slow();
      interruption = fail_with_root_cause(*holder, std::current_exception(), interrupt);
    }
    lock.lock();
    give_back(lock, std::move(holder), hands_over);
    return interruption;
  }
  // Returns when `work` is over, or at the deadline. Without a deadline it drives while no other
  // thread does; with one it leaves that to the progress thread, and sleeps. In the background it
  // never drives, and does not count as a waiter.
  void drive_or_wait(Lock& lock, Work& work, Deadline deadline, const Interrupt& interrupt,
                     bool background = false);
  // Returns whether nobody drives, and one call is all there is to do.
  bool has_only_one_call(const Lock& lock) noexcept;
  // Returns whether nobody drives, and there is nothing to do.
  bool is_idle(const Lock& lock) noexcept;
  void give_back(Lock& lock, Holder holder, bool hands_over = true);
  void take_observer(const Driver& holder) noexcept;

  // ---- The progress thread. ----
  void start_progress_thread();
  void start_progress_thread_once();  // where it was never started
  void stop_progress_thread();        // without the mutex
  void serve_soon();
  void announce_soon();
  // Polls the control sockets, while nobody drives.
  void poll_control(Lock& lock);

  // ---- Failures. ----
  void abort(const std::string& reason, bool alone) noexcept;
  void fail_with(const std::exception_ptr& error) noexcept;
  // Returns an interrupt that also throws if this communicator was aborted. It keeps a reference to
  // the given one.
  Interrupt abort_or(const Interrupt& interrupt);
  // Fails with the root cause of `error`. If an interrupt threw it, returns what that threw.
  std::exception_ptr fail_with_root_cause(Driver& holder, const std::exception_ptr& error,
                                          const Interrupt& interrupt);

  const Identity identity;
  const unsigned most_spins;  // turns before it yields to others
  const Log log;
  std::shared_ptr<Family> family;  // set before the first call; null: none
  Bell wakeup;                     // something was submitted or aborted
  StopRequests stop;
  AwaitedSenders senders;
  TrafficCounter traffic;
  std::atomic<double> patience{0};        // seconds
  std::atomic<bool> has_requests{false};  // an abort or new transfers: look under the mutex

  mutable std::mutex mutex;
  std::condition_variable changed;  // the driver has left, or the state has changed
  LifeCycle life;
  CallQueue calls;
  PlanCache plans;
  std::vector<int> link_of;  // see Links::link_of()
  // Of the call under way, and of the next ones. Only the driver changes the first, under the
  // mutex.
  std::shared_ptr<Observer> observer, next_observer;
  bool dropped = false;  // see Communicator::drop(); until all ranks have made its calls
  Exclusive<Driver> driver;

 private:
  enum class Service : std::uint8_t { kNone, kServed, kLeft };  // of the progress thread

  // See ProgressThread::Task and Family::Member.
  bool take_over() override;
  ProgressThread::Turn turn() noexcept override;
  void end_failed() noexcept override;
  unsigned spins() const noexcept override { return most_spins; }
  int before_sleep(std::vector<pollfd>& doorbells) noexcept override;
  void after_sleep() noexcept override;
  bool serve_between_calls() override;
  void fail_as(const transport::ControlFrame& failure, const Identity& there) noexcept override;
  bool serve() override;

  void bind(Pending& pending, const Request& request);
  void interrupt_or_abort(const Work& work, const Interrupt& interrupt);
  void check_dropped(Lock& lock);
  void fail(Driver& holder, const std::exception_ptr& error) noexcept;
  void fail_locked(Driver& holder, const std::exception_ptr& found) noexcept;
  void fail_if_asked(Driver& holder) noexcept;
  void fail_soon(const Lock& lock) noexcept;
  void fail_family() noexcept;
  void handle_requests(Lock& lock, Driver& holder);

  const std::shared_ptr<ProgressThread> progress_;
  Service service_ = Service::kNone;
  bool announces_ = false;  // the progress thread is to announce that calls are over
  Holder turns_;            // of the progress thread, while it drives
};

}  // namespace gradwire::exec
