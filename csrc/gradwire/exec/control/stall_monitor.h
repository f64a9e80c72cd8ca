// StallMonitor: reports a rank that does not move. It keeps the rank's status page, which shows
// after a second whom the rank waits for, and it logs one line per operation that has not moved for
// long: what it is, where it stands, whom it waits for, and what that rank does.
//
// The communicator's driver uses it; while there is no driver, whoever holds the mutex.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "gradwire/base/log.h"
#include "gradwire/exec/control/control_plane.h"
#include "gradwire/exec/control/status.h"

namespace gradwire::exec {

class StallMonitor {
 public:
  // stall_seconds: how long nothing must move before it is logged; 0: never.
  StallMonitor(const Identity& identity, double stall_seconds, Log log);

  // Run for every call, so they take only nanoseconds.
  void begin(std::uint32_t call, std::uint32_t fingerprint) noexcept {
    start_idle();
    published_ = false;
    status_.begin(call, fingerprint, idle_since_);
  }
  void end() noexcept {
    published_ = false;
    status_.end();
  }

  // Begins to count the time for which nothing moves.
  void start_idle() noexcept {
    idle_since_ = coarse_now();
    due_at_ = idle_since_ + publish_after_;
  }
  // Something moved; `outside` of any call.
  void set_moving(bool outside) noexcept {
    if (published_) status_.set_moving(outside);
    published_ = false;
  }

  // Whether report() is due: it publishes once and logs once while nothing moves.
  bool due() const noexcept { return coarse_now() >= due_at_; }
  void report(const Wait& wait, const ControlPlane& control);

  void set_failed(std::string_view reason) noexcept { status_.set_failed(reason); }
  void release() noexcept { status_.release(); }
  void release_after_fork() noexcept { status_.release_after_fork(); }

 private:
  // An operation that was logged.
  struct LoggedStall {
    Activity activity = Activity::kOutside;
    std::uint32_t number = 0;
    Rank peer = kNoPeer;  // of a message
    bool operator==(const LoggedStall&) const = default;
  };

  struct PositionLookup;
  void log_stall(const Wait& wait, const ControlPlane& control);

  Rank rank_;
  int size_;
  std::uint32_t communicator_;
  std::uint64_t tag_;
  double stall_seconds_;
  Log log_;
  Status status_;
  // Nanoseconds: times as coarse_now(), and spans.
  std::uint64_t publish_after_, log_after_;
  std::uint64_t idle_since_ = 0;
  std::uint64_t due_at_ = 0;
  bool published_ = false;  // the status page shows whom it waits for
  LoggedStall last_logged_;
};

}  // namespace gradwire::exec
