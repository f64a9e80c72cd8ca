// Liveness: notices that this rank's calls do not move, announces for whom it waits, here and in
// the rest of its family, and ends calls at their deadlines.
//
// A rank that dies, or whose host does, is found by its sockets, at once or after some seconds. So
// a deadline only ends waits for ranks that are slow or stopped. A query tells which: a rank that
// runs answers, within a call by its driver and between calls by its progress thread.
//
// It belongs to the Driver, and is used by whoever may use that.
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
  // Notes that nothing moves. After a while it announces for whom this rank waits, and logs it.
  void note_wait();
  // Ends a wait, and announces that, since other ranks' logs name whom this rank waits for.
  void stop_waiting();
  // Answers ranks that ask, while nobody drives. Returns whether one has asked for the position.
  bool serve();
  // Returns what this rank does and for whom it waits.
  Position position() const;

  // Starts the timeout of the call that begins.
  void start_deadline();
  // Throws Timeout if the call under way, or a transfer, has exceeded its timeout.
  void check_deadlines();
  // Returns when to act next although nothing moves.
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
  std::string describe_late(Rank peer) const;
  Timeout timeout() const;
  Timeout timeout_of(const Transfer& late) const;

  Engine& engine_;
  Driver& driver_;
  std::optional<Deadline::Clock::time_point> waits_since_;  // nothing has moved since
  Deadline announce_at_ = Deadline::never();
  bool announced_ = false;                   // of this wait
  Deadline serve_at_ = Deadline::at_once();  // when the family is served next
  Rank announced_job_peer_ = kNoPeer;        // the last Position::job_peer that was announced
  bool positions_queried_ = false;           // for this call
  Deadline query_due_ = Deadline::never();   // when to query positions; then, when to stop waiting
  std::optional<Deadline> transfer_query_;   // when the query for a late transfer ends
};

}  // namespace gradwire::exec
