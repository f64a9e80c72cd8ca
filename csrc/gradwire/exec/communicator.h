// Communicator: one rank's end of a group of ranks. It owns the links and the control sockets, and
// turns requests into executions.
//
// Threads: every public function may be called from any thread. Work is driven by one thread at a
// time, the driver: a blocking call drives on the caller's thread when nobody else does, otherwise
// the progress thread does, which is started by the first asynchronous call, and which the
// communicators of a family share (progress_thread.h). Collectives run in the order of their calls,
// transfers (send, recv) beside them.
//
// A failure is final: every pending and later call throws the same root cause.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "gradwire/base/deadline.h"
#include "gradwire/base/fd.h"
#include "gradwire/base/log.h"
#include "gradwire/base/stop_request.h"
#include "gradwire/base/wire.h"
#include "gradwire/base/work.h"
#include "gradwire/exec/control/awaited_senders.h"
#include "gradwire/exec/control/control_plane.h"
#include "gradwire/exec/control/family.h"
#include "gradwire/exec/control/identity.h"
#include "gradwire/exec/control/observer.h"
#include "gradwire/exec/control/stall_monitor.h"
#include "gradwire/exec/execution/execution.h"
#include "gradwire/exec/execution/links.h"
#include "gradwire/exec/execution/operation.h"
#include "gradwire/exec/execution/point_to_point.h"
#include "gradwire/exec/plan/plan_cache.h"
#include "gradwire/exec/program/cpu_device.h"
#include "gradwire/exec/progress_thread.h"

namespace gradwire::exec {

enum class Lane : std::uint8_t { kCollective, kPointToPoint };

struct Tuning {
  std::size_t max_message = kUsualFrame;  // bytes of the largest frame; the same on all ranks
  std::size_t segment_bytes = 0;          // 0: chosen for each operation
  double stall_seconds = 30;              // see StallMonitor; 0: never
  Log log = log_to_stderr;                // gets stalls, and errors that no call would report
  std::shared_ptr<Observer> observer = nullptr;  // is told of this rank's collectives
  transport::Contexts contexts{};                // this process's, for transports that need one
  std::shared_ptr<const StopRequest> stop_request = nullptr;  // this process's; null: none
  std::shared_ptr<ProgressThread> progress = nullptr;         // shared with others; null: its own
};

class Communicator final : private Family::Member, private ProgressThread::Member {
 public:
  // Called about every 100 ms by a thread that waits in a blocking call; throws to end the wait
  // (and abort the communicator), as Ctrl-C does.
  using Interrupt = WaitLimit::Interrupt;

  Communicator(Identity identity, Tuning tuning);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Take authenticated sockets, before anything else: all for control, then all for links. Only the
  // last link's call blocks, as it makes the links, so a rank waits only for ranks that have not
  // come to this point. A failure ends the communicator, and the others are told.
  void adopt_control(transport::Connection connection, Rank peer);
  void adopt_link(Lane lane, std::string_view transport, transport::Connection connection,
                  Rank peer, double timeout, const Interrupt& interrupt = nullptr);
  // Joins a family, of which it is a member until it is closed. After the last adopt_link(), before
  // any call, and once.
  void join(std::shared_ptr<Family> family);

  const Identity& identity() const noexcept { return identity_; }
  // Reports to `observer` from the next call on, or to none if it is null. The one before is let go
  // when the call under way is over.
  void observe(std::shared_ptr<Observer> observer);
  // Has collectives wait for so many seconds, where that is longer than their timeouts, for a rank
  // that is slow: one that answers. One that has not for a call's timeout ends it with Timeout.
  void set_patience(double seconds) noexcept { patience_ = seconds; }
  // Sets the cost model behind algorithm="auto". Must be the same on all ranks, between two calls.
  void set_model(schedule::CostModel model);

  void run(const Request& request, const Interrupt& interrupt = nullptr);
  // Starts the request and drives it for some microseconds; wait() does the rest. Calls `slow`
  // before it takes longer, as it does to find out which rank failed.
  std::shared_ptr<Work> begin(const Request& request, const std::function<void()>& slow = nullptr);
  std::shared_ptr<Work> submit(const Request& request);
  std::shared_ptr<Work> send(std::byte* data, std::size_t size, Rank to, double timeout);
  // Receives from rank `from`, or from whoever sends first if it is Transfer::kAnyRank.
  std::shared_ptr<Work> receive(std::byte* data, std::size_t size, Rank from, double timeout);
  // Blocks until the work is over, at most `timeout` seconds; then throws Timeout, and the work
  // goes on. Meanwhile this rank is one that waits, which others may be told, unless the thread is
  // one in the background, for which the program does not wait.
  void wait(Work& work, double timeout, const Interrupt& interrupt = nullptr,
            bool background = false);
  // The ranks for whose messages threads are blocked otherwise, until a recv in the background.
  AwaitedSenders& awaited_senders() noexcept { return senders_; }

  // Asks the job to stop, as the process's StopRequest does. May be called at any time.
  void request_stop() noexcept { own_stop_request_.make(); }
  // Returns whether this rank does.
  bool stop_requested() const noexcept;
  // Returns, on all ranks alike, whether any rank had asked the job to stop before it began one of
  // the calls so far: an all_reduce, reduce_scatter or all_gather. Their frames carry it. Waits
  // for calls that are under way, and throws what ended them.
  bool should_stop(const Interrupt& interrupt = nullptr);
  // The same for the next communicator, which members and processes that want to join form.
  void request_resize() noexcept { resize_request_.make(); }
  bool resize_requested() const noexcept { return resize_request_.made(); }
  bool should_resize(const Interrupt& interrupt = nullptr);

  // Ends every call with Aborted, here and, through control, on all ranks. Wakes all waiters.
  // During a close() that has sent BYE it only ends that wait; the other ranks are not told then.
  // Unless `alone`, this is a failure like any other, which ends the rest of the family too.
  void abort(const std::string& reason, bool alone = true) noexcept;
  // Ends every call with `error`, here and on all ranks, for a failure that was found outside of
  // calls. Does nothing if the communicator has failed already. Does what abort() does, with the
  // error's text, if another thread drives for more than a second.
  void fail_with(const std::exception_ptr& error) noexcept;
  // Finishes pending work within `timeout`, sends BYE, waits within `settle` seconds until all
  // ranks are known to have made the same calls (not at all if it is 0), and closes all sockets.
  // Later calls throw Aborted. Throws the error that ended the pending work, InvalidArgument if
  // ranks turn out to have made different calls, and Timeout if a rank does not come to this rank's
  // calls. A second thread that closes waits for the first, and aborts what that waits for after
  // `timeout` + `settle`, or when the interrupt throws.
  // `alone` says that the program goes on with other communicators.
  void close(double timeout, double settle, const Interrupt& interrupt = nullptr,
             bool alone = true);
  void close(double timeout, const Interrupt& interrupt = nullptr) {
    close(timeout, timeout, interrupt);
  }
  // Returns whether there is nothing to wait for after a drop: all ranks are known to have made
  // this rank's calls, or the communicator has ended, or has unfinished collectives, which its end
  // aborts.
  bool settled();
  // Tells that its user has dropped the communicator without close(): the progress thread goes on
  // polling the control sockets until all calls are settled, and logs a mismatch. A later close()
  // still throws it.
  void drop();
  bool closed() const;
  // Throws the communicator's failure if it has failed, or fails within some seconds, even if no
  // call of its own is under way.
  void check_failure(double seconds);
  // Closes a failed communicator and gives away the control sockets that are still connected. They
  // carry nothing more of this communicator once this rank's failure has been read.
  std::vector<std::pair<Rank, transport::Released>> release_controls();
  // Closes the descriptors in a forked child, which has them but not the threads, so that for the
  // peers they do not outlive the parent. Nothing else may be called there, not even the
  // destructor.
  void release_after_fork() noexcept;

  Traffic traffic() const { return traffic_.read(); }

 private:
  static constexpr unsigned kNoIdleLimit = ~0U;
  static constexpr std::size_t kMostDoorbells = 16;

  // A collective that waits for its turn, or has its turn. It is reused with all that it has
  // allocated.
  struct Pending {
    Operation operation;                             // or the present phase of its program
    CpuDevice* program = nullptr;                    // null: one plan
    std::shared_ptr<codec::ErrorFeedback> feedback;  // outlives all transactions
    std::uint64_t shape_digest = 0;                  // of the ShapeCheck
    std::string shape;
    bool checks_shape = false;                      // ShapeCheck::always
    Submission submission;                          // of the observer's
    codec::ErrorFeedback::Transaction transaction;  // unused by programs, which have their own
    std::unique_ptr<CpuDevice> device;              // made for the first program

    void settle() noexcept;  // rolls residuals back unless the call's end has settled them
    std::shared_ptr<Work> work = std::make_shared<Work>();
    double timeout = 0;
    Deadline::Clock::time_point began;  // to run
    Deadline deadline = Deadline::never();
  };

  std::shared_ptr<Work> enqueue(std::unique_lock<std::mutex>& lock, const Request& request);
  static void check_feedback(const Request& request);
  void bind(Pending& pending, const Request& request);
  void bind_operation(Pending& pending, const Request& request);
  std::shared_ptr<Work> enqueue_transfer(Transfer transfer, bool sends);
  std::unique_ptr<Pending> take_spare();
  bool agreed(const std::optional<std::uint64_t>& since, const Interrupt& interrupt);
  void check_peer(Rank peer) const;
  void require_alive() const;
  void wake_driver() noexcept;  // under the mutex
  void start_progress_thread_locked();
  void serve_soon_locked();
  void announce_soon_locked();
  void announce_ended_calls_locked();
  void settle_dropped(std::unique_lock<std::mutex>& lock);
  void stop_driving_locked(bool hands_over = true);
  void stop_progress_thread();
  void release();
  bool is_idle() const;
  std::exception_ptr finish_work(std::unique_lock<std::mutex>& lock, const Deadline& deadline,
                                 const Interrupt& interrupt);
  std::exception_ptr close_gracefully(std::unique_lock<std::mutex>& lock, double settle,
                                      const Interrupt& interrupt, bool alone);
  void await_close(std::unique_lock<std::mutex>& lock, const Deadline& deadline,
                   const Interrupt& interrupt, bool alone);
  void abort_close(bool interrupted, bool alone) noexcept;
  template <typename Over>
  std::exception_ptr wait_until(std::unique_lock<std::mutex>& lock, Over over,
                                const Deadline& deadline, const Interrupt& interrupt);
  void poll_control(std::unique_lock<std::mutex>& lock);

  void drive_or_wait(std::unique_lock<std::mutex>& lock, Work& work, Deadline deadline,
                     const Interrupt& interrupt, bool background = false);
  void interrupt_or_abort(const Work& work, const Interrupt& interrupt);

  // Drives: only one thread at a time does, the one that set driving_.
  void drive(std::unique_lock<std::mutex>& lock, const Work* until, const Interrupt& interrupt,
             unsigned most_idle = kNoIdleLimit, const std::function<void()>& slow = nullptr);
  void begin_driving_locked(const Work* until);
  void end_driving(std::unique_lock<std::mutex>& lock, bool hands_over);
  bool step(const Interrupt& interrupt);
  bool take_over() override;
  ProgressThread::Turn turn() noexcept override;
  bool step_beside_others();
  void end_failed() noexcept override;
  unsigned spins() const noexcept override { return spins_; }
  int before_sleep(std::vector<pollfd>& doorbells) noexcept override;
  void after_sleep() noexcept override;
  bool serve_between_calls() override;
  bool finished(const Work* until) const;
  bool advance();
  void process_requests();
  void take_observer_locked() noexcept;
  bool advance_collective();
  bool start_next();
  bool start_phase(bool finite);
  void start_operation();
  CallShape shape_of_call(const Plan& plan);
  void finish_operation();
  void finish_current(bool unannounced);
  void back_off(unsigned idle, const Interrupt& interrupt);
  void run_checks(const Interrupt& interrupt);
  void end_links() noexcept;
  void sleep(const Interrupt& interrupt);
  void note_wait();
  bool prepare_sleep(const Interrupt& interrupt);
  void disarm();
  void call_interrupt(const Interrupt& interrupt);
  int longest_sleep() const;
  std::size_t put_doorbells(std::span<pollfd, kMostDoorbells> fds) const;
  void poll_doorbells();
  void empty_wakeup() noexcept;
  void start_deadline();
  void set_deadline(Deadline deadline, double seconds);
  void check_deadlines();
  bool waits_on();
  void check_transfers();
  void query_positions();
  Rank late_peer() const;
  std::string word_of(Rank peer) const;
  Timeout timeout() const;
  Timeout timeout_of(const Transfer& transfer) const;
  Position position() const;
  std::optional<Wait> waiting();
  void start_waiting();
  void stop_waiting();
  void check_stall();
  Interrupt abort_or(const Interrupt& interrupt);
  std::exception_ptr fail_with_root_cause(const std::exception_ptr& error,
                                          const Interrupt& interrupt);
  void fail(const std::exception_ptr& error) noexcept;
  void fail_locked(const std::exception_ptr& found) noexcept;
  void fail_if_requested_locked() noexcept;
  void settle_requests(std::unique_lock<std::mutex>& lock);
  void fail_as(const transport::ControlFrame& failure, const Identity& there) noexcept override;
  bool serve() override;
  bool serve_locked();
  void serve_family();
  Rank awaited() const;
  bool collective_is_awaited() const;
  std::optional<Wait> awaited_transfer() const;
  void fail_family() noexcept;
  Aborted aborted() const;

  Identity identity_;
  const unsigned spins_;  // turns before it yields to others
  ControlPlane control_;
  Links links_;
  Links transfer_links_;
  std::shared_ptr<Family> family_;  // null: none
  UniqueFd wakeup_;                 // an eventfd: something was submitted or aborted

  mutable std::mutex mutex_;         // guards everything below but the driver's own
  std::condition_variable changed_;  // the driver left
  bool driving_ = false;
  bool closed_ = false;     // takes no more calls
  bool ending_ = false;     // a thread closes it, or has closed it
  bool ended_ = false;      // and everything is released
  bool started_ = false;    // the progress thread looks after it
  bool stopped_ = false;    // and no longer does
  bool announces_ = false;  // the progress thread will tell the others that calls are over
  bool dropped_ = false;    // drop() was called, and calls are not settled
  bool abort_requested_ = false;
  std::string abort_reason_;
  bool aborts_alone_ = false;
  std::exception_ptr family_failure_;  // another one's, with which this one must fail
  std::exception_ptr failure_;         // set once: the communicator is dead
  bool family_must_fail_ = false;      // by failure_, but does not know yet
  // Ranks made different calls, and this was found outside of any call: the next call, or close(),
  // throws it.
  mutable bool unreported_ = false;
  std::vector<std::unique_ptr<Pending>> queue_;  // the front is executing
  std::atomic<Pending*> front_{nullptr};         // of the queue, for the driver
  std::vector<std::unique_ptr<Pending>> spare_;
  std::vector<std::pair<Transfer, bool>> submitted_;  // transfers not yet seen by the driver
  std::uint64_t calls_over_ = 0;
  // Calls, with the one in which ranks agreed to stop, or to resize.
  std::optional<std::uint64_t> stop_since_, resize_since_;
  PlanCache plans_;
  AwaitedSenders senders_;
  std::atomic<double> patience_{0};        // seconds
  std::atomic<bool> finishes_{false};      // a thread that closes waits for all that is pending
  std::atomic<bool> has_requests_{false};  // an abort or new transfers: look under the mutex

  // The driver's own. While nobody drives, anybody may use them under the mutex.
  Pending* current_ = nullptr;        // the front of the queue, if it has started
  const Work* driven_for_ = nullptr;  // for which the driver is blocked; null: no caller's thread
  Deadline interrupt_due_ = Deadline::after(0);
  Deadline checks_due_ = Deadline::after(0);
  std::optional<Deadline::Clock::time_point> waits_since_;  // nothing has moved since
  Deadline announce_at_ = Deadline::never();
  unsigned turns_ = 0;                       // of this driver
  unsigned idle_turns_ = 0;                  // of the progress thread's, since something moved
  std::exception_ptr turn_error_;            // with which a turn of the progress thread failed
  int ended_links_ = 0;                      // peers' ends of which the links were told
  bool announced_ = false;                   // the others were told whom this rank waits for
  Deadline serve_at_ = Deadline::at_once();  // when the family is served next
  Rank announced_elsewhere_ = kNoPeer;       // the others were told of this wait elsewhere
  bool positions_queried_ = false;           // for this call
  Deadline query_due_ = Deadline::never();   // when to query positions; then, when to stop waiting
  std::optional<Deadline> transfer_query_;   // when the query for a late transfer ends
  std::uint16_t requests_agreed_ = 0;        // FrameFlags, in one of the collectives so far
  SeenShapes shapes_;
  Execution execution_;
  PointToPoint transfers_;
  TrafficCounter traffic_;
  Log log_;
  std::shared_ptr<Observer> observer_;       // changes between calls, under the mutex
  std::shared_ptr<Observer> next_observer_;  // from the next call on, under the mutex
  const std::shared_ptr<const StopRequest> stop_request_;
  StopRequest own_stop_request_, resize_request_;
  StallMonitor stall_monitor_;
  const std::shared_ptr<ProgressThread> progress_;
};

}  // namespace gradwire::exec
