// StallMonitor: reports that this rank's operations do not move. After a second it shows on the
// rank's status page for whom the rank waits. For each operation that has not moved for
// `stall_seconds` it logs one line: the operation, its position, for whom it waits, and what that
// rank does. It belongs to the communicator's Driver.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "gradwire/base/log.h"
#include "gradwire/exec/control/control_plane.h"
#include "gradwire/exec/control/status.h"
#include "gradwire/exec/control/status_scan.h"

namespace gradwire::exec {

class StallMonitor {
 public:
  // Logs an operation after `stall_seconds` in which nothing moves; 0: never.
  StallMonitor(const Identity& identity, double stall_seconds, Log log);

  // Both run for every call, so they take only nanoseconds.
  void begin(std::uint32_t call, std::uint32_t fingerprint) noexcept {
    start_idle();
    published_ = false;
    status_.begin(call, fingerprint, idle_since_);
  }
  void end() noexcept {
    published_ = false;
    status_.end();
  }

  // Begins to count the time in which nothing moves.
  void start_idle() noexcept {
    idle_since_ = coarse_now();
    due_at_ = idle_since_ + publish_after_;
  }
  // Records that something moved; `outside`: outside of any call.
  void set_moving(bool outside) noexcept {
    if (published_) status_.set_moving(outside);
    published_ = false;
  }

  // Returns whether to call report(): while nothing moves it publishes once and logs once.
  bool due() const noexcept { return coarse_now() >= due_at_; }
  void report(const Wait& wait, const ControlPlane& control);
  // Returns what a rank's status page shows, if it is on this host.
  std::optional<RankStatus> status_on_this_host(Rank rank) const;

  Status& status() noexcept { return status_; }

 private:
  // An operation that was logged as stalled.
  struct LoggedStall {
    Activity activity = Activity::kOutside;
    std::uint32_t number = 0;
    Rank peer = kNoPeer;  // of a message
    bool operator==(const LoggedStall&) const = default;
  };

  struct PositionLookup;
  bool is_status_of(const RankStatus& found, Rank rank) const;
  void log_stall(const Wait& wait, const ControlPlane& control);

  const Identity identity_;
  double stall_seconds_;
  Log log_;
  Status status_;
  // Nanoseconds: points in time as in coarse_now(), and durations.
  std::uint64_t publish_after_, log_after_;
  std::uint64_t idle_since_ = 0;
  std::uint64_t due_at_ = 0;
  bool published_ = false;  // the status page shows for whom it waits
  LoggedStall last_logged_;
};

}  // namespace gradwire::exec
