#include "gradwire/exec/liveness.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "gradwire/exec/engine.h"

namespace gradwire::exec {
namespace {

// A rank that has waited for so long announces whom it waits for.
constexpr double kAnnounceWaitSeconds = 0.1;
// How long a rank waits for answers to a query on behalf of another.
constexpr double kRelaySeconds = 0.2;
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
  if (end.peer != kNoPeer) return name_of(end.peer);
  return name_of(end.job_peer) + " of the job, in another group";
}

}  // namespace

Liveness::Liveness(Engine& engine, Driver& driver, const Tuning& tuning)
    : stalls(engine.identity, tuning.stall_seconds, tuning.log), engine_(engine), driver_(driver) {}

void Liveness::note_wait() {
  if (!waits_since_) start_waiting();
  announce_wait();
  if (engine_.family && announced_ && serve_at_.passed()) serve_family();
  if (stalls.due())
    if (const auto wait = waiting()) stalls.report(*wait, driver_.control);
}

void Liveness::start_waiting() {
  waits_since_ = Deadline::Clock::now();
  stalls.start_idle();
  const double longest =
      driver_.current == nullptr ? kAnnounceWaitSeconds : driver_.current->timeout / 2;
  announce_at_ = Deadline::after(std::min(longest, kAnnounceWaitSeconds));
}

void Liveness::stop_waiting() {
  waits_since_.reset();
  stalls.set_moving(/*outside=*/driver_.current == nullptr);
  if (!std::exchange(announced_, false)) return;
  driver_.control.announce();
  if (!engine_.family) return;
  engine_.family->set_wait(engine_, kNoPeer);
  engine_.family->serve_others(engine_);
}

// Announces, once per wait, whom this rank waits for.
void Liveness::announce_wait() {
  if (announced_ || !announce_at_.passed()) return;
  announced_ = true;
  driver_.control.announce();
}

// Has this rank answer in the family's other members, while it waits in this one: for whom, and
// whom that waits for, which it finds out when it is asked.
void Liveness::serve_family() {
  serve_at_ = Deadline::after(kInterruptSeconds);
  if (!driver_.control.awaits_replies(kRelaySeconds)) {
    const Rank peer = awaited();
    const ChainEnd end = peer == kNoPeer ? ChainEnd{} : driver_.control.end_of_chain(peer);
    engine_.family->set_wait(
        engine_, end.peer == kNoPeer ? end.job_peer : engine_.identity.job_rank(end.peer));
  }
  const bool asked = engine_.family->serve_others(engine_);
  const bool queries = positions_queried_ || transfer_query_;  // its own answers come first
  if (asked && !queries && !driver_.control.awaits_replies(kRelaySeconds))
    driver_.control.query_positions();
}

bool Liveness::serve() {
  const bool asked = driver_.control.serve();
  const Rank job_peer = position().job_peer;
  if (job_peer != std::exchange(announced_job_peer_, job_peer)) driver_.control.announce();
  return asked;
}

// Returns the rank for which a thread of the program is blocked in this communicator. One that
// computes while its calls go on in the background waits for nobody.
Rank Liveness::awaited() const {
  if (!waits_since_) return kNoPeer;
  if (const auto transfer = awaited_transfer()) return transfer->peer;
  if (driver_.current == nullptr || !collective_is_awaited()) return kNoPeer;
  const Rank peer = driver_.execution.waiting_for();
  return peer != kNoPeer ? peer : driver_.links.full_peer();
}

// Returns whether a thread is blocked until a collective is over: it waits for those before it too.
bool Liveness::collective_is_awaited() const {
  const std::lock_guard lock(engine_.mutex);
  return engine_.life.state() != Life::kOpen ||
         std::ranges::any_of(engine_.calls, [this](const auto& each) {
           return each->work.get() == driver_.driven_for || each->work->awaited();
         });
}

// Returns the transfer for which a thread is blocked.
std::optional<Wait> Liveness::awaited_transfer() const {
  if (driver_.transfers.idle()) return std::nullopt;
  auto wait = driver_.transfers.waiting([this](const Transfer& each, bool sends) {
    return engine_.life.state() != Life::kOpen || each.work.get() == driver_.driven_for ||
           each.work->awaited() || (!sends && engine_.senders.contains(each.peer));
  });
  if (wait && wait->peer == Transfer::kAnyRank) wait->peer = engine_.senders.one();
  return wait;
}

Position Liveness::position() const {
  Position at;
  at.in_call = driver_.current != nullptr;
  if (waits_since_) at.seconds = seconds_since(*waits_since_);
  if (!at.in_call) {
    if (const auto transfer = awaited_transfer(); transfer && waits_since_) {
      at.waits_for = transfer->peer;
      return at;
    }
    if (engine_.family) at.job_peer = engine_.family->awaited_by_others(engine_);
    if (at.job_peer != kNoPeer) at.waits_for = engine_.identity.member(at.job_peer);
    return at;
  }
  if (!waits_since_) return at;
  at.waits_for = driver_.execution.waiting_for();
  if (const Frame* frame = driver_.execution.waiting_frame()) {
    at.round = frame->round;
    at.segment = frame->segment;
  }
  return at;
}

// Returns the position as the stall monitor needs it: the call's or, outside of calls, a
// transfer's.
std::optional<Wait> Liveness::waiting() {
  if (driver_.current == nullptr) return awaited_transfer();
  const Plan& plan = driver_.current->operation.plan();
  const Position at = position();
  Wait wait;
  wait.number = driver_.control.history().calls() - 1;
  wait.reads = driver_.execution.waits_for_reader();
  wait.peer = at.waits_for != kNoPeer ? at.waits_for : driver_.links.full_peer();
  wait.round = at.round;
  wait.segment = at.segment;
  wait.fingerprint = plan.fingerprint();
  wait.spec = plan.text();
  return wait;
}

void Liveness::start_deadline() {
  driver_.current->began = CoarseClock::now();
  set_deadline(Deadline::about(driver_.current->timeout), driver_.current->timeout);
}

void Liveness::set_deadline(Deadline deadline, double seconds) {
  driver_.current->deadline = deadline;
  query_due_ = deadline.earlier(std::min(seconds / 2, kPositionQuerySeconds));
  positions_queried_ = false;
}

Deadline Liveness::next_due() const {
  Deadline next = announced_ ? Deadline::never() : announce_at_;
  const Pending* call = driver_.current;
  if (call == nullptr) return next;
  next = std::min(next, query_due_);
  return call->deadline.passed() ? next : std::min(next, call->deadline);
}

// Queries the ranks' positions before the deadline, so that Timeout names the rank at the end of
// the chain and not the neighbour, which only waits too.
void Liveness::check_deadlines() {
  check_transfers();
  if (driver_.current == nullptr) return;
  if (!positions_queried_ && query_due_.passed()) return query_positions();
  if (!positions_queried_ || !driver_.current->deadline.passed()) return;
  if (!driver_.control.all_replied() && !query_due_.passed()) return;
  if (!waits_on()) throw timeout();
}

// Waits on where the rank at the end of the chain is slow and not lost: as long as it has been
// heard of within the call's timeout, and no longer than the patience. Returns whether it does.
bool Liveness::waits_on() {
  const double waited = seconds_since(driver_.current->began);
  const double patience = engine_.patience;
  if (waited >= patience) return false;
  const ChainEnd end = driver_.control.end_of_chain(late_peer());
  const double silent = end.peer == kNoPeer
                            ? 0
                            : std::min(waited, driver_.control.seconds_since_message_of(end.peer));
  if (silent >= driver_.current->timeout) return false;
  const double most = std::min(driver_.current->timeout - silent, patience - waited);
  const double seconds =
      std::max(kLeastWaitSeconds, std::min(most, driver_.current->timeout / kQueriesInTimeout));
  set_deadline(Deadline::after(seconds), seconds);
  return true;
}

// Throws Timeout for a late transfer. The query of positions begins at its deadline, so its Timeout
// comes that much later.
void Liveness::check_transfers() {
  const Transfer* late = driver_.transfers.overdue();
  if (late == nullptr) return transfer_query_.reset();
  if (!transfer_query_) {
    transfer_query_ = Deadline::after(kPositionQuerySeconds);
    driver_.control.query_positions();
  }
  if (driver_.control.all_replied() || transfer_query_->passed()) throw timeout_of(*late);
}

void Liveness::query_positions() {
  positions_queried_ = true;
  query_due_ = std::max(driver_.current->deadline, Deadline::after(kPositionQuerySeconds));
  driver_.control.query_positions();
}

// Returns the rank for which the call under way waits.
Rank Liveness::late_peer() const {
  return driver_.execution.waiting_frame() != nullptr ? driver_.execution.waiting_for()
                                                      : driver_.links.full_peer();
}

// Returns what is known of a rank that is waited for, as sentences.
std::string Liveness::describe_late(Rank peer) const {
  const auto seen = stalls.status_on_this_host(peer);
  if (seen ? !seen->stopped() : driver_.control.has_replied(peer))
    return " It is alive: " + (seen ? describe(*seen) : driver_.control.text_of_position(peer)) +
           ". Did it make the same call? A longer timeout= waits for a rank that is slow";
  const double silent = std::round(10 * driver_.control.seconds_since_message_of(peer)) / 10;
  return " It has not been heard of for " + seconds_text(silent) +
         ", though its connection is open: " +
         (seen ? describe(*seen)
               : text_of(ChainEnd{peer}) + " is stopped, or hangs, or makes no call here");
}

Timeout Liveness::timeout_of(const Transfer& late) const {
  const bool any = late.peer == Transfer::kAnyRank;
  const bool own = late.peer == engine_.identity.rank;
  const ChainEnd culprit =
      any || own ? ChainEnd{late.peer} : driver_.control.end_of_chain(late.peer);
  std::string text = name_of(engine_.identity.rank) + " timed out: no send or recv matched with " +
                     (any ? "any rank" : name_of(late.peer)) +
                     " within its timeout=" + seconds_text(late.timeout);
  if (culprit.peer != late.peer)
    text += "; that waits, perhaps over others, for " + text_of(culprit);
  if (!any && !own && culprit.peer != kNoPeer) text += "." + describe_late(culprit.peer);
  return {text, culprit.peer, culprit.job_peer};
}

Timeout Liveness::timeout() const {
  const Frame* frame = driver_.execution.waiting_frame();
  const Rank peer = late_peer();
  const ChainEnd culprit = driver_.control.end_of_chain(peer);
  const bool waited_on = engine_.patience > driver_.current->timeout &&
                         seconds_since(driver_.current->began) >= engine_.patience;
  std::string text = name_of(engine_.identity.rank) + ": " +
                     driver_.current->operation.plan().text() + " timed out after its " +
                     (waited_on ? "patience=" + seconds_text(engine_.patience)
                                : "timeout=" + seconds_text(driver_.current->timeout));
  if (frame != nullptr)
    text += "; it waits for rank " + std::to_string(peer) + " in round " +
            std::to_string(frame->round) + ", segment " + std::to_string(frame->segment);
  else
    text += "; rank " + std::to_string(peer) + " does not read what was sent to it";
  if (culprit.peer != peer) text += ", which waits, perhaps over others, for " + text_of(culprit);
  if (culprit.peer != kNoPeer) text += "." + describe_late(culprit.peer);
  return {text, culprit.peer, culprit.job_peer};
}

}  // namespace gradwire::exec
