// ControlPlane: the messages between ranks besides the data: who failed and why, who closed
// cleanly, who waits for whom, who called what. By these every rank names the root cause of a
// failure, even without a data link to the rank that failed, and ranks that make different calls
// notice, even if they never exchange data.
//
// Every message describes the sender's calls by their number and a digest of all. A rank sends one
// when it begins to wait, with a call if it has sent none for 0.1 s, within 0.1 s after a call
// whose data does not reach all ranks, and with the BYE. A message that does not match the
// receiver's own history causes a Disagreement; inquire() then finds out who called what.
//
// A call is *confirmed* when all ranks are known to have made the same one. A call in which data
// flows from every rank to every other (all_reduce, all_gather, reduce_scatter) is confirmed when
// it is over; any other, when every peer has said that it has finished it. No rank closes cleanly
// before its calls are confirmed.
//
// It belongs to the communicator's Driver.
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

// What a rank does: whether it is in a call, and what it waits for.
struct Position {
  bool in_call = false;
  Rank waits_for = kNoPeer;   // kNoPeer: it waits for nobody
  std::uint16_t round = 0;    // of the frame that it waits for
  std::uint32_t segment = 0;  // likewise
  double seconds = 0;         // for how long it has waited
  // The rank of the job for which it waits in another communicator; waits_for is that rank's number
  // in this one.
  Rank job_peer = kNoPeer;
};

// The rank that all wait for: its number in the communicator, or in the job if it is no member.
struct ChainEnd {
  Rank peer = kNoPeer;
  Rank job_peer = kNoPeer;
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

  // `position` must return where this rank is now. It is called on the driver's thread.
  ControlPlane(Rank rank, int size, std::function<Position()> position);

  // The sockets: to adopt them, to send failures, and to see which peers have ended.
  transport::Control& sockets() noexcept { return control_; }
  const transport::Control& sockets() const noexcept { return control_; }

  // Records that a collective begins. Throws as poll() does.
  void begin_call(std::shared_ptr<const Plan> plan, const CallShape& shape = {});
  // Records that the last call is over. Returns whether that is to be announced.
  bool end_call() noexcept;
  const CallHistory& history() const noexcept { return history_; }
  // Returns whether calls have ended that were not announced.
  bool has_unannounced_calls() const noexcept { return unannounced_; }
  // Returns a rank that is not known to have made this rank's calls but may still say so; kNoPeer
  // if there is none.
  Rank unconfirmed_peer() const;

  // Processes and answers the messages that have arrived. Throws RootCause when a rank has failed,
  // and Disagreement when a rank made another call.
  void poll();
  // Answers the messages that have arrived while this rank waits in another communicator. A message
  // for which poll() would throw is kept for it. Returns whether a rank has asked for the position.
  bool serve();
  // Sends this rank's position to the others.
  void announce();

  // Asks all ranks for their positions. A rank whose driver runs answers at once. A rank that is
  // stopped, or outside of any call, does not answer.
  void query_positions();
  bool all_replied() const;
  // Returns whether the last query was less than so many seconds ago and has not been answered by
  // all.
  bool awaits_replies(double seconds) const;
  // Returns the rank that all others wait for, according to the last query: the first rank on the
  // chain from `peer` that has not replied or waits for nobody; if the chain leads out of the
  // communicator, its end as the last member knows it; if it is a circle, a rank that has not
  // replied, or else one that waits for nobody.
  ChainEnd end_of_chain(Rank peer) const;
  // Returns whether a rank has answered the last query.
  bool has_replied(Rank peer) const { return !is_silent(peer); }
  // Returns the seconds since a rank's last position came or, without one, since the start.
  double seconds_since_message_of(Rank peer) const;
  // Describes the position that a rank sent last: "rank 1 waits for rank 2 in call 12, ...".
  std::string text_of_position(Rank peer) const;
  const LastPosition& last_position_of(Rank peer) const { return last_positions_.at(at(peer)); }

  // Returns the cause of an error of this rank: a link often fails because of an earlier failure,
  // which the other ranks may know. Takes at most half a second, and as long again if it calls
  // inquire(). Throws what the interrupt throws meanwhile.
  std::exception_ptr root_cause(const std::exception_ptr& error,
                                const Interrupt& interrupt = nullptr);
  // Asks all ranks for their last calls. Returns an InvalidArgument that says who called what, or
  // the failure that ended the inquiry. Takes at most half a second. Throws what the interrupt
  // throws meanwhile.
  std::exception_ptr inquire(const Disagreement& found, const Interrupt& interrupt = nullptr);

  // Sends BYE and waits until `together` for the BYE of others, since ranks that close together
  // compare their calls; then up to `wait_limit` until all calls are confirmed, else throws
  // Timeout. Throws as poll() does, but ignores failures of others that are no disagreement.
  // `alone`: the program goes on with other communicators.
  void close_gracefully(const WaitLimit& wait_limit, const Deadline& together = Deadline::at_once(),
                        bool alone = true);
  // Does the same without waiting.
  void close_now(bool alone = true);

 private:
  std::optional<transport::ControlEvent> next_event();
  void take(const transport::ControlEvent& event);
  void take_while_closing(const transport::ControlEvent& event);
  void say_goodbye(bool alone) noexcept;
  void poll_while_closing();
  Timeout close_timeout(Rank peer) const;
  std::string size_text(const Disagreement& found, const MismatchReport& report) const;
  void compare(Rank peer);
  void compare_ends() const;
  void send_call_records(Rank to, std::uint32_t call) noexcept;
  bool is_present(Rank peer) const { return control_.connected(peer) && !control_.said_bye(peer); }
  bool waits_for_nobody(Rank peer) const;
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
  std::vector<transport::ControlEvent> kept_;  // by serve(), for poll()
  CallHistory history_;
  std::vector<LastPosition> last_positions_;  // by peer
  Clock::time_point made_at_ = Clock::now();
  bool some_are_ahead_ = false;  // of this rank's calls; they are compared when it has made them
  bool closing_ = false;
  bool unannounced_ = false;
  std::uint32_t confirmed_ = 0;             // calls that are confirmed by their data
  std::vector<bool> failed_while_closing_;  // by peer: it failed while this rank closed
  Deadline announce_at_ = Deadline::at_once();
  Clock::time_point queried_at_{};
};

}  // namespace gradwire::exec
