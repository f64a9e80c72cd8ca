// Driver: what the one thread that drives a communicator works on, and how it moves it. Only who
// holds it (exclusive.h), or has the mutex while nobody does, gets at it.
//
// A blocking call drives on its own thread, since waking another one takes longer than a small
// collective. The driver takes the mutex where calls begin and end, and not while they move. That
// keeps a small call free of locks, and lets other threads submit while a long one runs.
//
// Waiting goes in three steps, each of which costs less latency but more processor time than the
// next: spin, yield, sleep in poll() on all doorbells. Before it sleeps it arms the doorbells and
// tries once more, or a message that came in between would ring none.
#pragma once

#include <poll.h>

#include <cstdint>
#include <exception>
#include <span>

#include "gradwire/base/deadline.h"
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

// How long a waiting thread waits at most until it calls the interrupt.
inline constexpr int kInterruptMilliseconds = 100;
inline constexpr double kInterruptSeconds = kInterruptMilliseconds / 1e3;

class Driver {
 public:
  using Interrupt = WaitLimit::Interrupt;
  static constexpr std::size_t kMostDoorbells = 16;

  Driver(Engine& engine, const Tuning& tuning);

  // A driver first moves what has arrived, and then looks for failures, which may have come after
  // it. `until`: for which the caller's thread is blocked; null: it is none.
  void begin(const Work* until) noexcept {
    driven_for = until;
    turns_ = 0;
  }
  // Moves what can move, and returns whether something did. step_beside_others() is for a thread
  // that others share, and keep from sleep.
  bool step(const Interrupt& interrupt);
  bool step_beside_others();
  // Returns whether `until` is over or, if that is null, nothing is left to do.
  bool finished(const Work* until) const;
  // Waits after so many steps in a row that moved nothing.
  void back_off(unsigned idle, const Interrupt& interrupt);
  // Arms the doorbells. Returns whether something has moved meanwhile. disarm() must follow.
  bool prepare_sleep(const Interrupt& interrupt);
  void disarm();
  // Puts the doorbells there; returns how many there are.
  std::size_t put_doorbells(std::span<pollfd, kMostDoorbells> fds) const;
  // Returns the milliseconds until something is due even if no doorbell rings.
  int longest_sleep() const;
  // Calls it, and wraps what it throws: no other rank may be the root cause of that.
  static void call_interrupt(const Interrupt& interrupt);
  // Ends all calls and transfers with an error. Under the mutex.
  void fail(const std::exception_ptr& error) noexcept;
  // Closes all descriptors.
  void close() noexcept;

  ControlPlane control;
  Links links, transfer_links;
  Pending* current = nullptr;        // the front of the queue, if it has started
  const Work* driven_for = nullptr;  // see begin()
  Execution execution;
  PointToPoint transfers;
  Liveness liveness;
  std::exception_ptr turn_error;  // with which a turn of the progress thread failed

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
  void sleep(const Interrupt& interrupt);

  Engine& engine_;
  Deadline interrupt_due_ = Deadline::after(0);
  Deadline checks_due_ = Deadline::after(0);
  unsigned turns_ = 0;                 // of this driver
  unsigned idle_turns_ = 0;            // of the progress thread's, since something moved
  int ended_links_ = 0;                // peers' ends of which the links were told
  std::uint16_t requests_agreed_ = 0;  // FrameFlags, in one of the collectives so far
  SeenShapes shapes_;
};

}  // namespace gradwire::exec
