// The deadlines of calls and messages: whom a late one waits for, and whether that rank is alive.
//
// A rank that dies, or whose host does, is found by its sockets, at once or after some seconds. So
// a deadline only ends waits for ranks that are slow, or stopped. Which of them, a query tells: a
// living rank answers, within a call by its driver and between calls by its progress thread.
#include <algorithm>
#include <cmath>

#include "gradwire/base/error.h"
#include "gradwire/exec/communicator.h"

namespace gradwire::exec {
namespace {

// How long before a deadline the ranks are asked for their positions.
constexpr double kPositionQuerySeconds = 0.5;
// How often they are asked within a timeout while a rank waits on for one that is slow, and how
// long it waits on at least.
constexpr double kQueriesInTimeout = 10;
constexpr double kLeastWaitSeconds = 0.1;

double seconds_since(Deadline::Clock::time_point when) {
  return std::chrono::duration<double>(Deadline::Clock::now() - when).count();
}

// Returns "rank 3", or what names a rank that is no member.
std::string text_of(const ChainEnd& end) {
  if (end.peer != kNoPeer) return "rank " + std::to_string(end.peer);
  return "rank " + std::to_string(end.job_peer) + " of the job, in another group";
}

}  // namespace

void Communicator::start_deadline() {
  current_->began = CoarseClock::now();
  set_deadline(Deadline::about(current_->timeout), current_->timeout);
}

void Communicator::set_deadline(Deadline deadline, double seconds) {
  current_->deadline = deadline;
  query_due_ = deadline.earlier(std::min(seconds / 2, kPositionQuerySeconds));
  positions_queried_ = false;
}

// Queries the ranks' positions before the deadline, so that Timeout names the rank at the end of
// the chain and not the neighbour, which only waits too.
void Communicator::check_deadlines() {
  check_transfers();
  if (current_ == nullptr) return;
  if (!positions_queried_ && query_due_.passed()) return query_positions();
  if (!positions_queried_ || !current_->deadline.passed()) return;
  if (!control_.all_replied() && !query_due_.passed()) return;
  if (!waits_on()) throw timeout();
}

// Waits on where the rank at the end of the chain is slow and not lost: as long as it has been
// heard of within the call's timeout, and no longer than the patience. Returns whether it does.
bool Communicator::waits_on() {
  const double waited = seconds_since(current_->began);
  const double patience = patience_;
  if (waited >= patience) return false;
  const ChainEnd end = control_.end_of_chain(late_peer());
  const double silent =
      end.peer == kNoPeer ? 0 : std::min(waited, control_.seconds_since_word_of(end.peer));
  if (silent >= current_->timeout) return false;
  const double most = std::min(current_->timeout - silent, patience - waited);
  const double seconds =
      std::max(kLeastWaitSeconds, std::min(most, current_->timeout / kQueriesInTimeout));
  set_deadline(Deadline::after(seconds), seconds);
  return true;
}

// Throws Timeout for a late transfer. The query of positions begins at its deadline, so its Timeout
// comes that much later.
void Communicator::check_transfers() {
  const Transfer* late = transfers_.overdue();
  if (late == nullptr) return transfer_query_.reset();
  if (!transfer_query_) {
    transfer_query_ = Deadline::after(kPositionQuerySeconds);
    control_.query_positions();
  }
  if (control_.all_replied() || transfer_query_->passed()) throw timeout_of(*late);
}

void Communicator::query_positions() {
  positions_queried_ = true;
  query_due_ = std::max(current_->deadline, Deadline::after(kPositionQuerySeconds));
  control_.query_positions();
}

// Returns the rank for which the call under way waits.
Rank Communicator::late_peer() const {
  return execution_.waiting_frame() != nullptr ? execution_.waiting_for() : links_.full_peer();
}

// Returns what is known of a rank that is waited for, as sentences.
std::string Communicator::word_of(Rank peer) const {
  const auto seen = stall_monitor_.seen_here(peer);
  if (seen ? !seen->stopped() : control_.has_replied(peer))
    return " It is alive: " + (seen ? describe(*seen) : control_.text_of_position(peer)) +
           ". Did it make the same call? A longer timeout= waits for a rank that is slow";
  const double silent = std::round(10 * control_.seconds_since_word_of(peer)) / 10;
  return " It has not been heard of for " + seconds_text(silent) +
         ", though its connection is open: " +
         (seen ? describe(*seen)
               : text_of(ChainEnd{peer}) + " is stopped, or hangs, or makes no call here");
}

Timeout Communicator::timeout_of(const Transfer& late) const {
  const bool any = late.peer == Transfer::kAnyRank;
  const bool own = late.peer == identity_.rank;
  const ChainEnd culprit = any || own ? ChainEnd{late.peer} : control_.end_of_chain(late.peer);
  std::string text = "rank " + std::to_string(identity_.rank) +
                     " timed out: no send or recv matched with " +
                     (any ? "any rank" : "rank " + std::to_string(late.peer)) +
                     " within its timeout=" + seconds_text(late.timeout);
  if (culprit.peer != late.peer)
    text += "; that waits, perhaps over others, for " + text_of(culprit);
  if (!any && !own && culprit.peer != kNoPeer) text += "." + word_of(culprit.peer);
  return {text, culprit.peer, culprit.job_peer};
}

Timeout Communicator::timeout() const {
  const Frame* frame = execution_.waiting_frame();
  const Rank peer = late_peer();
  const ChainEnd culprit = control_.end_of_chain(peer);
  const bool waited_on =
      patience_ > current_->timeout && seconds_since(current_->began) >= patience_;
  std::string text = "rank " + std::to_string(identity_.rank) + ": " +
                     current_->operation.plan().text() + " timed out after its " +
                     (waited_on ? "patience=" + seconds_text(patience_)
                                : "timeout=" + seconds_text(current_->timeout));
  if (frame != nullptr)
    text += "; it waits for rank " + std::to_string(peer) + " in round " +
            std::to_string(frame->round) + ", segment " + std::to_string(frame->segment);
  else
    text += "; rank " + std::to_string(peer) + " does not read what was sent to it";
  if (culprit.peer != peer) text += ", which waits, perhaps over others, for " + text_of(culprit);
  if (culprit.peer != kNoPeer) text += "." + word_of(culprit.peer);
  return {text, culprit.peer, culprit.job_peer};
}

}  // namespace gradwire::exec
