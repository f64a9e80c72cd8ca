// Driver: the state that only the thread which drives a communicator uses, and what that thread
// does with it. It is reached through Exclusive<Driver> (exclusive.h): by its holder, or under the
// mutex while it has none.
//
// A blocking call drives on its own thread, since waking another one takes longer than a small
// collective. The driver takes the mutex where calls begin and end, and not while they move. That
// keeps a small call free of locks, and lets other threads submit while a long one runs.
//
// A driver that waits first spins, then yields, then sleeps in poll() on all doorbells: each step
// costs less processor time and more latency than the one before. Where waits are long it soon
// sleeps at once. Before it sleeps it arms the doorbells and looks once more, since what came
// before that rings none.
#pragma once

#include <poll.h>

#include <cstdint>
#include <exception>
#include <span>

#include "gradwire/base/deadline.h"
#include "gradwire/base/spin.h"
#include "gradwire/base/wait_limit.h"
#include "gradwire/exec/call_queue.h"
#include "gradwire/exec/control/control_plane.h"
#include "gradwire/exec/execution/execution.h"
#include "gradwire/exec/execution/links.h"
#include "gradwire/exec/execution/point_to_point.h"
#include "gradwire/exec/liveness.h"
#include "gradwire/exec/tuning.h"

namespace gradwire::exec {

class Engine;

inline constexpr double kInterruptSeconds = kInterruptMilliseconds / 1e3;

class Driver {
 public:
  using Interrupt = WaitLimit::Interrupt;
  static constexpr std::size_t kMostDoorbells = 16;

  Driver(Engine& engine, const Tuning& tuning);

  // Begins to drive: what has arrived moves before failures are looked for, which may have come
  // after it. `until`: the work for which the calling thread is blocked; null: none.
  void begin(const Work* until) noexcept {
    driven_for = until;
    turns_ = 0;
  }
  // Moves what can move, and returns whether something did. step_beside_others() is for the
  // progress thread, which other communicators may keep from sleeping.
  bool step(const Interrupt& interrupt);
  bool step_beside_others();
  // Returns whether `until` is over or, if it is null, whether nothing is left to do.
  bool finished(const Work* until) const;
  // Waits for a moment after `idle` steps in a row that moved nothing, or returns false: after so
  // many it is time to sleep.
  bool back_off(unsigned idle) noexcept;
  // Waits until a doorbell rings.
  void sleep(const Interrupt& interrupt);
  // Arms the doorbells. Returns whether something has moved meanwhile. disarm() must follow.
  bool prepare_sleep(const Interrupt& interrupt);
  void disarm();
  // Writes the descriptors to poll, and returns their number.
  std::size_t put_doorbells(std::span<pollfd, kMostDoorbells> fds) const;
  // Returns for how many milliseconds to sleep at most, if no doorbell rings.
  int longest_sleep() const;
  // Calls the interrupt, and throws what it throws as an Interruption.
  static void call_interrupt(const Interrupt& interrupt);
  // Ends all calls and transfers with an error, and tells the other ranks. Wants the mutex held.
  void fail(const std::exception_ptr& error) noexcept;
  // Closes all descriptors.
  void close() noexcept;

  ControlPlane control;
  Links links, transfer_links;
  Pending* current = nullptr;        // the call under way; null: none
  const Work* driven_for = nullptr;  // see begin()
  Execution execution;
  PointToPoint transfers;
  Liveness liveness;
  std::exception_ptr turn_error;  // what the progress thread's last turn threw

 private:
  bool advance();
  void process_requests();
  bool advance_collective();
  bool start_next();
  bool start_phase(bool finite);
  void start_operation();
  CallShape shape_of_call(const Plan& plan);
  void finish_operation();
  void finish_current(bool unannounced);
  void run_checks(const Interrupt& interrupt);
  void end_links() noexcept;

  Engine& engine_;
  Deadline interrupt_due_ = Deadline::after(0);
  Deadline checks_due_ = Deadline::after(0);
  unsigned turns_ = 0;                 // since begin()
  unsigned idle_turns_ = 0;            // of the progress thread, in a row
  int ended_links_ = 0;                // peers that were reported to the links as gone
  std::uint16_t requests_agreed_ = 0;  // FrameFlags of all collectives so far
  Backoff backoff_;
  SeenShapes shapes_;
};

}  // namespace gradwire::exec
