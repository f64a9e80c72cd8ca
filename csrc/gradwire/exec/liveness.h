// Liveness: whether this rank's calls move, and what it tells others of that: whom it waits for,
// here and in the rest of its family, and when a call has waited for too long.
//
// A rank that dies, or whose host does, is found by its sockets, at once or after some seconds. So
// a deadline only ends waits for ranks that are slow, or stopped. Which of them, a query tells: a
// living rank answers, within a call by its driver and between calls by its progress thread.
//
// A part of the Driver: who may use that may use it.
#pragma once

#include <optional>
#include <string>

#include "gradwire/base/deadline.h"
#include "gradwire/base/error.h"
#include "gradwire/exec/control/stall_monitor.h"
#include "gradwire/exec/execution/point_to_point.h"
#include "gradwire/exec/tuning.h"

namespace gradwire::exec {

class Driver;
class Engine;

class Liveness {
 public:
  Liveness(Engine& engine, Driver& driver, const Tuning& tuning);

  // Returns whether nothing has moved since note_wait().
  bool waits() const noexcept { return waits_since_.has_value(); }
  // Does what a rank does that waits: it tells others for whom, and logs it, after a while.
  void note_wait();
  // Ends a wait. Other ranks' logs name whom this rank waits for, so they are told.
  void stop_waiting();
  // Answers those who ask, where nobody drives. Returns whether a rank has asked for the position.
  bool serve();
  // Returns where this rank is.
  Position position() const;

  // The call that begins has its time from now on.
  void start_deadline();
  // Throws Timeout where the call under way, or a transfer, has had its time.
  void check_deadlines();
  // Returns when something is due although nothing moves.
  Deadline next_due() const;

  StallMonitor stalls;

 private:
  void start_waiting();
  void announce_wait();
  void serve_family();
  Rank awaited() const;
  bool collective_is_awaited() const;
  std::optional<Wait> awaited_transfer() const;
  std::optional<Wait> waiting();
  void set_deadline(Deadline deadline, double seconds);
  bool waits_on();
  void check_transfers();
  void query_positions();
  Rank late_peer() const;
  std::string word_of(Rank peer) const;
  Timeout timeout() const;
  Timeout timeout_of(const Transfer& late) const;

  Engine& engine_;
  Driver& driver_;
  std::optional<Deadline::Clock::time_point> waits_since_;  // nothing has moved since
  Deadline announce_at_ = Deadline::never();
  bool announced_ = false;                   // the others were told whom this rank waits for
  Deadline serve_at_ = Deadline::at_once();  // when the family is served next
  Rank announced_elsewhere_ = kNoPeer;       // the others were told of this wait elsewhere
  bool positions_queried_ = false;           // for this call
  Deadline query_due_ = Deadline::never();   // when to query positions; then, when to stop waiting
  std::optional<Deadline> transfer_query_;   // when the query for a late transfer ends
};

}  // namespace gradwire::exec
