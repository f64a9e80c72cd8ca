// Watch: makes a rank that does not move say so. It keeps the rank's status page, which shows after
// a second whom the rank waits for, and it logs one line per operation that has not moved for long:
// what it is, where it stands, whom it waits for, and what that rank does.
//
// Used by the communicator's driver, and by anybody under its mutex while nobody drives.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "gradwire/base/log.h"
#include "gradwire/exec/control/control_plane.h"
#include "gradwire/exec/control/status.h"

namespace gradwire::exec {

class Watch {
 public:
  // stall_seconds: without movement, until the log is told; 0: never.
  Watch(const Identity& identity, double stall_seconds, Log log);

  // For every call, so only nanoseconds.
  void begin(std::uint32_t call, std::uint32_t fingerprint) noexcept {
    quiet();
    shown_ = false;
    status_.begin(call, fingerprint, quiet_since_);
  }
  void end() noexcept {
    shown_ = false;
    status_.end();
  }

  // From now on nothing moves, as far as is known.
  void quiet() noexcept {
    quiet_since_ = coarse_now();
    due_at_ = quiet_since_ + show_after_;
  }
  // Something moved; `outside` of any call.
  void moves(bool outside) noexcept {
    if (shown_) status_.moves(outside);
    shown_ = false;
  }

  // Whether report() has something to do: it shows and tells once each, while nothing moves.
  bool due() const noexcept { return coarse_now() >= due_at_; }
  void report(const Wait& wait, const ControlPlane& control);

  void fails(std::string_view reason) noexcept { status_.fails(reason); }
  void let_go() noexcept { status_.let_go(); }
  void let_go_in_child() noexcept { status_.let_go_in_child(); }

 private:
  // An operation that was told of.
  struct Told {
    Activity activity = Activity::kOutside;
    std::uint32_t number = 0;
    Rank peer = kNoPeer;  // of a message
    bool operator==(const Told&) const = default;
  };

  struct Known;
  void tell(const Wait& wait, const ControlPlane& control);

  Rank rank_;
  int size_;
  std::uint32_t communicator_;
  std::uint64_t tag_;
  double stall_seconds_;
  Log log_;
  Status status_;
  // Nanoseconds: times as coarse_now(), and spans.
  std::uint64_t show_after_, tell_after_;
  std::uint64_t quiet_since_ = 0;
  std::uint64_t due_at_ = 0;
  bool shown_ = false;  // the page says whom it waits for
  Told last_told_;
};

}  // namespace gradwire::exec
