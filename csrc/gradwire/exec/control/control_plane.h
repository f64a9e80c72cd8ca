// ControlPlane: the messages between ranks beside the data: who failed and why, who closed cleanly,
// who waits for whom, who called what. So every rank names the root cause, even without a data link
// to the culprit, and ranks that make different calls find out, even if they never exchange data.
//
// Every frame describes the sender's calls: their number and a digest of all. Frames go out when a
// rank begins to wait, with a call when none has gone for 0.1 s, within 0.1 s after a call whose
// data does not reach all ranks, and with the BYE. A frame that does not match this rank's own
// history makes a Disagreement; inquire() then finds out who called what.
//
// A call is *settled* when all ranks are known to have made the same one. A call in which data
// flows from every rank to every other (all_reduce, all_gather, reduce_scatter) is settled when it
// is over; any other when every peer has said that it has finished it. No rank closes cleanly
// before.
//
// The communicator's driver owns it; while there is no driver, whoever holds the mutex.
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
#include "gradwire/base/wait_limit.h"
#include "gradwire/exec/control/failure.h"
#include "gradwire/exec/control/history.h"
#include "gradwire/exec/control/mismatch_report.h"
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
  using Interrupt = WaitLimit::Interrupt;
  // The last position that a rank sent, and when it arrived (the epoch: never).
  struct LastPosition {
    transport::ControlFrame frame;
    Clock::time_point received_at;
  };

  // `position` says where this rank is now; called on the driver's thread.
  ControlPlane(Rank rank, int size, std::function<Position()> position);

  void adopt(UniqueFd socket, Rank peer) { control_.adopt(std::move(socket), peer); }
  int doorbell() const noexcept { return control_.doorbell(); }

  // A collective begins. Throws as listen() does.
  void begin_call(std::shared_ptr<const Plan> plan, const CallShape& shape = {});
  // The call that began last is over. Returns whether the others must be told so.
  bool end_call() noexcept;
  const CallHistory& history() const noexcept { return history_; }
  // Whether calls have ended of which the others were not told.
  bool has_unannounced_calls() const noexcept { return unannounced_; }
  // A rank that is not known to have made this rank's calls, and that may still say so; kNoPeer
  // where there is none.
  Rank unsettled_peer() const;

  // Processes the frames that have arrived, and answers. Throws RootCause when a rank has failed,
  // Disagreement when one made another call.
  void poll();
  // Sends this rank's position to the others.
  void announce();

  // Asks all ranks for their positions. A rank whose driver runs answers at once; one that is
  // stopped, or outside of any call, does not.
  void query_positions();
  bool all_replied() const;
  // The rank that all others wait for, by the last query: the first rank on the chain from `peer`
  // that has not replied or waits for nobody; where the chain is a circle, one that has not
  // replied.
  Rank end_of_chain(Rank peer) const;
  const LastPosition& last_position_of(Rank peer) const {
    return last_positions_.at(static_cast<std::size_t>(peer));
  }

  // The cause of an error of this rank: a link often fails because of an earlier failure, which the
  // other ranks may know. Takes at most half a second, and as long again for inquire(); throws what
  // the interrupt throws meanwhile.
  std::exception_ptr root_cause(const std::exception_ptr& error,
                                const Interrupt& interrupt = nullptr);
  // Asks all ranks for their last calls. Returns an InvalidArgument that says who called what, or
  // the failure that ended the inquiry. Takes half a second when a rank does not answer, else less.
  // Interrupted as root_cause().
  std::exception_ptr inquire(const Disagreement& found, const Interrupt& interrupt = nullptr);

  void say_failure(const std::exception_ptr& error) noexcept;
  // Sends BYE, and waits until `together` for that of others: ranks that close together compare
  // their calls. Waits within `wait_limit` for all calls to be settled; then Timeout. Throws as
  // poll() does, except that failures other than a disagreement no longer matter.
  void close_gracefully(const WaitLimit& wait_limit,
                        const Deadline& together = Deadline::at_once());
  // The same without waiting for calls that are not settled.
  void close_now();

  // Gives a peer's socket to another owner; see Control::release.
  std::optional<transport::Released> release(Rank peer, double timeout) {
    return control_.release(peer, timeout);
  }
  // Closes every socket without a BYE.
  void close_all() noexcept { control_.close_all(); }

 private:
  void take(const transport::ControlEvent& event);
  void take_while_closing(const transport::ControlEvent& event);
  void poll_while_closing();
  Timeout close_timeout(Rank peer) const;
  std::string size_text(const Disagreement& found, const MismatchReport& report) const;
  void compare(Rank peer);
  void compare_ends() const;
  void send_call_records(Rank to, std::uint32_t call) noexcept;
  bool is_present(Rank peer) const { return control_.connected(peer) && !control_.said_bye(peer); }
  bool is_silent(Rank peer) const { return last_position_of(peer).received_at < queried_at_; }
  std::optional<std::exception_ptr> ask_others(Rank peer, const Interrupt& interrupt);
  std::exception_ptr closed_early(Rank peer) const;
  MismatchReport start_report(std::uint32_t call) const;
  void mark_gone(MismatchReport& report) const;
  std::exception_ptr add_answer(MismatchReport& report, const transport::ControlEvent& event);
  void sleep(const WaitLimit& wait_limit) const;
  transport::ControlFrame frame_of(transport::ControlType type, std::uint32_t calls) const noexcept;
  transport::ControlFrame position_frame() const;

  Rank rank_;
  int size_;
  std::function<Position()> position_;
  transport::Control control_;
  CallHistory history_;
  std::vector<LastPosition> last_positions_;  // by peer
  bool some_are_ahead_ = false;  // they are compared when this rank comes to their call
  bool closing_ = false;
  bool unannounced_ = false;
  std::uint32_t settled_ = 0;               // calls, by their data
  std::vector<bool> failed_while_closing_;  // by peer: it failed, while this rank left
  Deadline announce_at_ = Deadline::at_once();
  Clock::time_point queried_at_{};
};

}  // namespace gradwire::exec
