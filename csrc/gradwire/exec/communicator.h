// Communicator: one rank's end of a group of ranks. It owns the links and the control sockets, and
// runs the calls that are requested. Any thread may call it. Collectives run in the order of their
// calls, transfers (send, recv) beside them. A failure is final: every call throws the root cause.
#pragma once

#include <optional>

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
  // Is called at least every 0.1 s in a wait. If it throws, as on Ctrl-C, the communicator aborts,
  // and the wait ends with what was thrown.
  using Interrupt = WaitLimit::Interrupt;

  Communicator(Identity identity, const Tuning& tuning);
  ~Communicator();
  // Take authenticated sockets, before anything else: all for control, then all for links. The call
  // with the last link blocks until all ranks have come to it. A failure ends the communicator.
  void adopt_control(transport::Connection connection, Rank peer);
  void adopt_link(Lane lane, std::string_view transport, transport::Connection connection,
                  Rank peer, double timeout, const Interrupt& interrupt = nullptr);
  // Joins a family until it is closed: once, after the last adopt_link(), before the user's calls.
  void join(std::shared_ptr<Family> family);
  const Identity& identity() const noexcept;
  // Reports to `observer`, or to none, from the next call on.
  void observe(std::shared_ptr<Observer> observer);
  // Lets collectives wait beyond their timeouts, up to so many seconds, while the rank that they
  // wait for still answers. If it has not answered for a call's timeout, the call throws Timeout.
  void set_patience(double seconds) noexcept;
  // Sets the cost model behind algorithm="auto": the same on all ranks, between two calls.
  void set_model(schedule::CostModel model);
  void set_sites(schedule::Sites sites);  // likewise
  bool has_sites() const;                 // whether there are several
  void run(const Request& request, const Interrupt& interrupt = nullptr);
  // Starts the request and drives it for some microseconds, without sleep: the caller may hold what
  // another rank needs. wait() does the rest. `slow` is called before it takes longer, which it
  // does to find out which rank failed.
  std::shared_ptr<Work> begin(const Request& request, const std::function<void()>& slow = nullptr);
  std::shared_ptr<Work> submit(const Request& request);
  // `packed_as`: the elements, which then travel packed (codec/lossless.h) where they can.
  std::shared_ptr<Work> send(std::byte* data, std::size_t size, Rank to, double timeout,
                             std::optional<DType> packed_as = std::nullopt);
  // Receives from rank `from`, or from whoever sends first if it is Transfer::kAnyRank.
  std::shared_ptr<Work> receive(std::byte* data, std::size_t size, Rank from, double timeout);
  // Blocks until the work is over; after `timeout` seconds throws Timeout, and the work goes on.
  // Ranks that ask learn that this one waits, unless it does so in the `background`.
  void wait(Work& work, double timeout, const Interrupt& interrupt = nullptr,
            bool background = false);
  // The ranks for whose messages threads wait by other means than wait().
  AwaitedSenders& awaited_senders() noexcept;
  // Ask the job to stop, as the process's StopRequest does, or for a new communicator of members
  // and processes that want to join; and return whether this rank has asked.
  void request_stop() noexcept;
  void request_resize() noexcept;
  bool stop_requested() const noexcept;
  bool resize_requested() const noexcept;
  // Return, on all ranks alike, whether any rank had asked before it began one of the calls so far
  // (all_reduce, reduce_scatter, all_gather). Wait for the calls under way; throw their error.
  bool should_stop(const Interrupt& interrupt = nullptr);
  bool should_resize(const Interrupt& interrupt = nullptr);
  // Ends every call with Aborted, on all ranks. While another thread is in close() and has sent
  // BYE, only ends that thread's wait. Unless `alone`, the rest of the family ends, too.
  void abort(const std::string& reason, bool alone = true) noexcept;
  // Ends every call with an error that was found outside of calls, unless one has ended it already.
  // If another thread drives for more than a second, the error becomes Aborted, with its text.
  void fail_with(const std::exception_ptr& error) noexcept;
  // Finishes pending work within `timeout` seconds, sends BYE, waits up to `confirm` seconds until
  // all ranks are known to have made the same calls (0: does not wait), and closes all sockets.
  // Later calls throw Aborted. Throws the error that ended the pending work, InvalidArgument if
  // ranks made different calls, and Timeout if a rank does not come to this rank's calls. A second
  // thread that closes waits for the first, and aborts what that waits for after `timeout` +
  // `confirm`, or when the interrupt throws. `alone`: the program goes on with other communicators.
  void close(double timeout, double confirm, const Interrupt& interrupt = nullptr,
             bool alone = true);
  void close(double timeout, const Interrupt& interrupt = nullptr);
  // Returns whether nothing is to be waited for before the communicator is dropped: all ranks are
  // known to have made this rank's calls, or it has ended, or some are unfinished and will abort.
  bool is_confirmed();
  // Notes that its user dropped it without close(): the progress thread polls the control sockets
  // until all ranks have made its calls, and logs a mismatch, which a later close() still throws.
  void drop();
  bool closed() const;
  // Waits so many seconds for a failure, and throws it. No call needs to be under way.
  void check_failure(double seconds);
  // Closes a failed communicator and returns the control sockets that are still connected, of a
  // peer one for each way. Behind this rank's failure they carry nothing more of this communicator.
  std::vector<std::pair<Rank, transport::Released>> release_controls();
  // In a forked child, closes the descriptors, so that peers see the parent's end. Nothing else may
  // be called there, not even the destructor.
  void release_after_fork() noexcept;
  Traffic traffic() const;

 private:
  const std::unique_ptr<Engine> engine_;
};

}  // namespace gradwire::exec
