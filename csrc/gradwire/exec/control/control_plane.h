// ControlPlane: what a rank tells the others and hears from them beside the data: who failed and
// why, who left in peace, who waits for whom, who called what. So every rank names the root cause,
// though it may have no data link to the culprit, and ranks that differ in their calls learn it,
// though they may never exchange data.
//
// Every frame tells of the sender's calls: their number and a digest of all. They go out when a
// rank begins to wait, with a call when none has gone for 0.1 s, within 0.1 s after a call whose
// data does not tell all ranks, and with the BYE. A frame that does not match this rank's own
// history makes a Disagreement; inquire() then finds out who called what.
//
// A call is *settled* when all ranks are known to have made the same one: those in which every rank
// hears of every other (all_reduce, all_gather, reduce_scatter) when they are over, others when
// every peer has said that it has finished them. Nobody leaves in peace before.
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
#include "gradwire/base/patience.h"
#include "gradwire/exec/control/failure.h"
#include "gradwire/exec/control/history.h"
#include "gradwire/exec/control/inquest.h"
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
  using Interrupt = Patience::Interrupt;
  // The last that a rank said of its position, and when it was heard (the epoch: never).
  struct Word {
    transport::ControlFrame frame;
    Clock::time_point heard;
  };

  // `position` says where this rank is now; called on the driver's thread.
  ControlPlane(Rank rank, int size, std::function<Position()> position);

  void adopt(UniqueFd socket, Rank peer) { control_.adopt(std::move(socket), peer); }
  int doorbell() const noexcept { return control_.doorbell(); }

  // A collective begins. Throws as listen() does.
  void begin_call(std::shared_ptr<const Plan> plan, const CallShape& shape = {});
  // The last one that began is over. Returns whether the others are to be told of it.
  bool end_call() noexcept;
  const CallHistory& history() const noexcept { return history_; }
  // Whether there are calls of which the others were not told that they are over.
  bool is_untold() const noexcept { return untold_; }
  // A rank whose calls are not known to be those of this one, and that may still say so; kNoPeer
  // where there is none.
  Rank unsettled_peer() const;

  // Takes what has arrived, and answers. Throws RootCause when a rank has failed, Disagreement when
  // one made another call.
  void listen();
  // Tells the others where this rank is.
  void announce();

  // Asks all where they are. Who drives answers at once; who is stopped or elsewhere does not.
  void call_roll();
  bool roll_is_complete() const;
  // Whom everybody waits for, as far as the last call of the roll tells: the first rank on the way
  // from `peer` that is silent or waits for nobody; where they wait in a circle, a silent rank.
  Rank end_of_chain(Rank peer) const;
  const Word& last_word_of(Rank peer) const { return words_.at(static_cast<std::size_t>(peer)); }

  // What is behind an error of this rank's: a link's failure is often the echo of another, which
  // the others may know. Takes at most half a second, and as long again for an inquest; throws what
  // the interrupt throws meanwhile.
  std::exception_ptr root_cause(const std::exception_ptr& error,
                                const Interrupt& interrupt = nullptr);
  // An InvalidArgument that says who called what, or what ended this rank's questions. Takes at
  // most half a second, and as long only when a rank does not answer. Interrupted as root_cause().
  std::exception_ptr inquire(const Disagreement& found, const Interrupt& interrupt = nullptr);

  void say_failure(const std::exception_ptr& error) noexcept;
  // Says BYE, and waits `together` for that of others: those who leave together compare their
  // calls. Waits, at most so long as `patience` has it, for all calls to be settled; then Timeout.
  // Throws as listen() does, but that failures other than a disagreement no longer matter.
  void take_leave(const Patience& patience, const Deadline& together = Deadline::at_once());
  // The same without the wait for what is not settled.
  void leave_at_once();

  // Gives a peer's socket to another owner; see Control::release.
  std::optional<transport::Released> release(Rank peer, double timeout) {
    return control_.release(peer, timeout);
  }
  // Closes every socket without a word.
  void let_go() noexcept { control_.let_go(); }

 private:
  void take(const transport::ControlEvent& event);
  void take_leaving(const transport::ControlEvent& event);
  void hear_leaving();
  Timeout unsettled(Rank peer) const;
  std::string size_text(const Disagreement& found, const Inquest& inquest) const;
  void compare(Rank peer);
  void compare_ends() const;
  void testify(Rank to, std::uint32_t call) noexcept;
  bool is_present(Rank peer) const { return control_.connected(peer) && !control_.said_bye(peer); }
  bool is_silent(Rank peer) const { return last_word_of(peer).heard < roll_called_; }
  std::optional<std::exception_ptr> others_say(Rank peer, const Interrupt& interrupt);
  std::exception_ptr left_in_peace(Rank peer) const;
  Inquest open_inquest(std::uint32_t call) const;
  void dismiss_gone(Inquest& inquest) const;
  std::exception_ptr hear(Inquest& inquest, const transport::ControlEvent& event);
  void rest(const Patience& patience) const;
  transport::ControlFrame frame_of(transport::ControlType type, std::uint32_t calls) const noexcept;
  transport::ControlFrame position_frame() const;

  Rank rank_;
  int size_;
  std::function<Position()> position_;
  transport::Control control_;
  CallHistory history_;
  std::vector<Word> words_;      // by peer
  bool some_are_ahead_ = false;  // to be compared when this rank comes to their call
  bool leaving_ = false;
  bool untold_ = false;
  std::uint32_t settled_ = 0;  // calls, by their data
  std::vector<bool> gave_up_;  // by peer: it failed, while this rank left
  Deadline tell_at_ = Deadline::at_once();
  Clock::time_point roll_called_{};
};

}  // namespace gradwire::exec
