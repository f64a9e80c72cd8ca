// Communicator: one rank's end of a group of ranks. It owns the links and the control sockets, and
// turns requests into executions. Any thread may call it. Collectives run in the order of their
// calls, transfers (send, recv) beside them. A failure is final: every call throws the root cause.
#pragma once

#include "gradwire/base/wait_limit.h"
#include "gradwire/exec/control/awaited_senders.h"
#include "gradwire/exec/control/family.h"
#include "gradwire/exec/execution/point_to_point.h"
#include "gradwire/exec/tuning.h"
#include "gradwire/schedule/cost.h"

namespace gradwire::exec {

class Engine;

class Communicator {
 public:
  // Called now and then in a wait; throws to end it, and abort the communicator, as Ctrl-C does.
  using Interrupt = WaitLimit::Interrupt;

  Communicator(Identity identity, const Tuning& tuning);
  ~Communicator();
  // Take authenticated sockets, before anything else: all for control, then all for links. Only the
  // last link's call blocks, for ranks that have not come to this point. A failure ends the
  // communicator, and the others are told.
  void adopt_control(transport::Connection connection, Rank peer);
  void adopt_link(Lane lane, std::string_view transport, transport::Connection connection,
                  Rank peer, double timeout, const Interrupt& interrupt = nullptr);
  // Joins a family until it is closed: once, after the last adopt_link(), before any call.
  void join(std::shared_ptr<Family> family);
  const Identity& identity() const noexcept;
  // Reports to `observer`, or to none, from the next call on.
  void observe(std::shared_ptr<Observer> observer);
  // Has collectives wait for so many seconds, where that is longer than their timeouts, for a rank
  // that is slow: one that answers. One that has not for a call's timeout ends it with Timeout.
  void set_patience(double seconds) noexcept;
  // Sets the cost model behind algorithm="auto": the same on all ranks, between two calls.
  void set_model(schedule::CostModel model);
  void run(const Request& request, const Interrupt& interrupt = nullptr);
  // Starts the request and drives it for some microseconds; wait() does the rest. Calls `slow`
  // before it takes longer, as it does to find out which rank failed.
  std::shared_ptr<Work> begin(const Request& request, const std::function<void()>& slow = nullptr);
  std::shared_ptr<Work> submit(const Request& request);
  std::shared_ptr<Work> send(std::byte* data, std::size_t size, Rank to, double timeout);
  // Receives from rank `from`, or from whoever sends first if it is Transfer::kAnyRank.
  std::shared_ptr<Work> receive(std::byte* data, std::size_t size, Rank from, double timeout);
  // Blocks until the work is over, at most `timeout` seconds; then throws Timeout, and it goes on.
  // Others may be told that this rank waits, unless it does so in the background.
  void wait(Work& work, double timeout, const Interrupt& interrupt = nullptr,
            bool background = false);
  // The ranks for whose messages threads are blocked otherwise, until a recv in the background.
  AwaitedSenders& awaited_senders() noexcept;
  // Asks the job to stop, as the process's StopRequest does, or for the next communicator, which
  // members and processes that want to join form; returns whether this rank does.
  void request_stop() noexcept;
  void request_resize() noexcept;
  bool stop_requested() const noexcept;
  bool resize_requested() const noexcept;
  // Return, on all ranks alike, whether any rank had asked before it began one of the calls so far
  // (all_reduce, reduce_scatter, all_gather). Wait for calls under way; throw what ended them.
  bool should_stop(const Interrupt& interrupt = nullptr);
  bool should_resize(const Interrupt& interrupt = nullptr);
  // Ends every call with Aborted, on all ranks. During a close() that has sent BYE it only ends
  // that wait. Unless `alone`, the rest of the family ends, too.
  void abort(const std::string& reason, bool alone = true) noexcept;
  // Ends every call with a failure that was found outside of calls, if there is none; as abort()
  // does, with the error's text, if another thread drives for more than a second.
  void fail_with(const std::exception_ptr& error) noexcept;
  // Finishes pending work within `timeout`, sends BYE, waits within `settle` seconds until all
  // ranks are known to have made the same calls (not at all if it is 0), and closes all sockets.
  // Later calls throw Aborted. Throws the error that ended the pending work, InvalidArgument if
  // ranks made different calls, and Timeout if a rank does not come to this rank's calls. A second
  // thread that closes waits for the first, and aborts what that waits for after `timeout` +
  // `settle`, or when the interrupt throws. `alone`: the program goes on with other communicators.
  void close(double timeout, double settle, const Interrupt& interrupt = nullptr,
             bool alone = true);
  void close(double timeout, const Interrupt& interrupt = nullptr);
  // Returns whether a drop leaves nothing to wait for: all ranks are known to have made this rank's
  // calls, or it has ended, or has unfinished collectives, which its end aborts.
  bool settled();
  // Tells that its user dropped it without close(): the progress thread polls the control sockets
  // until all calls are settled, and logs a mismatch, which a later close() still throws.
  void drop();
  bool closed() const;
  // Throws the failure if there is one within some seconds, even if no call is under way.
  void check_failure(double seconds);
  // Closes a failed communicator and gives away the control sockets that are still connected, which
  // carry nothing more of it once this rank's failure has been read.
  std::vector<std::pair<Rank, transport::Released>> release_controls();
  // Closes the descriptors in a forked child, where nothing else may be called, not even the
  // destructor, so that for the peers they do not outlive the parent.
  void release_after_fork() noexcept;
  Traffic traffic() const;

 private:
  const std::unique_ptr<Engine> engine_;
};

}  // namespace gradwire::exec
