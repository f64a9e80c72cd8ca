// ControlPlane: what a rank tells the others and hears from them beside the data: who failed and
// why, who left in peace, who waits for whom. So every rank names the root cause, though it may
// have no data link to the culprit.
//
// Belongs to the communicator's driver; to anybody under its mutex while nobody drives.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "gradwire/base/deadline.h"
#include "gradwire/base/error.h"
#include "gradwire/base/fd.h"
#include "gradwire/exec/history.h"
#include "gradwire/transport/control.h"

namespace gradwire::exec {

// Where a rank is: in a call or between calls, and what it waits for.
struct Position {
  bool in_call = false;
  Rank waits_for = kNoPeer;   // kNoPeer: for nobody
  std::uint16_t round = 0;    // of the frame that it waits for
  std::uint32_t segment = 0;  // likewise
  double seconds = 0;         // since when it waits
};

class ControlPlane {
 public:
  using Clock = Deadline::Clock;
  // The last that a rank said of its position, and when it was heard (the epoch: never).
  struct Word {
    transport::ControlFrame frame;
    Clock::time_point heard;
  };

  // `position` says where this rank is now; called on the driver's thread.
  ControlPlane(Rank rank, int size, std::function<Position()> position);

  void adopt(UniqueFd socket, Rank peer) { control_.adopt(std::move(socket), peer); }
  int doorbell() const noexcept { return control_.doorbell(); }

  // A collective begins.
  void begin_call(std::shared_ptr<const Plan> plan) { history_.add(std::move(plan)); }
  const CallHistory& history() const noexcept { return history_; }

  // Takes what has arrived; throws RootCause when that is a failure.
  void listen();
  // Tells the others where this rank is.
  void announce();

  // Whom everybody waits for: the last rank on the way from `peer` that did not say that it waits
  // itself.
  Rank end_of_chain(Rank peer) const;
  const Word& last_word_of(Rank peer) const { return words_.at(static_cast<std::size_t>(peer)); }

  // What is behind an error of this rank's: a link's failure is often the echo of another, which
  // the others may know. Takes at most half a second.
  std::exception_ptr root_cause(const std::exception_ptr& error);

  // The last words: after one of them this rank says no more.
  void say_failure(const std::exception_ptr& error) noexcept;
  void say_bye();

  // Gives a peer's socket to another owner; see Control::release.
  std::optional<transport::Released> release(Rank peer, double timeout) {
    return control_.release(peer, timeout);
  }
  // Closes every socket without a word.
  void let_go() noexcept { control_.let_go(); }

 private:
  void take(const transport::ControlEvent& event);
  std::optional<std::exception_ptr> others_say(Rank peer);
  std::exception_ptr left_in_peace(Rank peer) const;
  transport::ControlFrame frame_of(transport::ControlType type) const noexcept;

  Rank rank_;
  int size_;
  std::function<Position()> position_;
  transport::Control control_;
  CallHistory history_;
  std::vector<Word> words_;  // by peer
};

}  // namespace gradwire::exec
