#include "gradwire/exec/control/control_plane.h"

#include <poll.h>

#include <algorithm>

namespace gradwire::exec {
namespace {

using transport::ControlEvent;
using transport::ControlFrame;
using transport::ControlType;
using transport::FailureKind;

// How long a rank whose link failed waits for the others to name the root cause, and how long
// inquire() waits for answers.
constexpr double kRootCauseSeconds = 0.5;
constexpr double kInquirySeconds = 0.5;
// How often a rank announces its position while its calls go on.
constexpr double kPositionSeconds = 0.1;
// How many calls an answer describes, of which the last is the one in question.
constexpr std::uint32_t kCallsSent = 16;

}  // namespace

ControlPlane::ControlPlane(Rank rank, int size, std::function<Position()> position)
    : rank_(rank),
      size_(size),
      position_(std::move(position)),
      control_(rank, size),
      last_positions_(at(size)),
      failed_while_closing_(at(size)) {}

// ---- Calls -------------------------------------------------------------------------------------

void ControlPlane::begin_call(std::shared_ptr<const Plan> plan, const CallShape& shape) {
  history_.add(std::move(plan), shape);
  if (std::exchange(some_are_ahead_, false))
    for (Rank peer = 0; peer < size_; ++peer) compare(peer);
  if (!announce_at_.passed_about()) return;
  poll();
  announce();
}

bool ControlPlane::end_call() noexcept {
  const CallHistory::Record* last = history_.after(history_.calls());
  const bool by_data = last != nullptr && last->plan->confirms_all_ranks();
  if (by_data) confirmed_ = history_.calls();
  unannounced_ = !by_data && size_ > 1;
  return unannounced_;
}

Rank ControlPlane::unconfirmed_peer() const {
  if (confirmed_ == history_.calls()) return kNoPeer;
  for (Rank peer = 0; peer < size_; ++peer) {
    const ControlFrame& frame = last_position_of(peer).frame;
    const std::uint32_t begun = (frame.flags & transport::kInCall) != 0 ? 1 : 0;
    const auto behind = static_cast<std::int32_t>(history_.calls() - (frame.calls - begun));
    if (is_present(peer) && !failed_while_closing_[at(peer)] && behind > 0) return peer;
  }
  return kNoPeer;
}

// Compares the calls in a peer's last frame with this rank's own, if both ranks have begun them.
void ControlPlane::compare(Rank peer) {
  const ControlFrame& frame = last_position_of(peer).frame;
  if (frame.calls == 0) return;
  if (static_cast<std::int32_t>(frame.calls - history_.calls()) > 0) {
    some_are_ahead_ = true;
    return;
  }
  const CallHistory::Record* own = history_.after(frame.calls);
  if (own != nullptr && own->digest != frame.digest)
    throw Disagreement{frame.calls - 1, name_of(peer) + " called " + text_of(frame) +
                                            " as its call " + std::to_string(frame.calls - 1) +
                                            ", and " + name_of(rank_) + " other calls up to there"};
}

// Compares the number of calls with those of ranks that have closed: they will make no more.
void ControlPlane::compare_ends() const {
  for (Rank peer = 0; peer < size_; ++peer) {
    const std::uint32_t calls = last_position_of(peer).frame.calls;
    if (peer != rank_ && control_.said_bye(peer) && calls != history_.calls())
      throw Disagreement{std::min(calls, history_.calls()),
                         name_of(peer) + " left after " + std::to_string(calls) + " calls, " +
                             name_of(rank_) + " after " + std::to_string(history_.calls())};
  }
}

// ---- Frames ------------------------------------------------------------------------------------

void ControlPlane::poll() {
  while (const auto event = next_event()) take(*event);
}

std::optional<ControlEvent> ControlPlane::next_event() {
  if (kept_.empty()) return control_.poll();
  const ControlEvent event = kept_.front();
  kept_.erase(kept_.begin());
  return event;
}

bool ControlPlane::serve() {
  bool asked = false;
  while (const auto event = control_.poll()) {
    const ControlFrame& frame = event->frame;
    asked =
        asked || (frame.type == ControlType::kPosition && (frame.flags & transport::kAsks) != 0);
    try {
      take(*event);
    } catch (...) {
      kept_.push_back(*event);
    }
  }
  return asked;
}

void ControlPlane::take(const ControlEvent& event) {
  const ControlFrame& frame = event.frame;
  if (frame.type == ControlType::kFailure) throw RootCause{error_of(frame)};
  if (frame.type == ControlType::kInquiry)
    return send_call_records(event.from, static_cast<std::uint32_t>(frame.value));
  if (frame.type == ControlType::kAnswer) return;  // too late: inquire() is over
  last_positions_[at(event.from)] = {frame, Clock::now()};
  if ((frame.flags & transport::kAsks) != 0) control_.send(event.from, position_frame());
  compare(event.from);
}

// Returns a frame that describes the first `calls` calls. The history holds only the last ones.
ControlFrame ControlPlane::frame_of(ControlType type, std::uint32_t calls) const noexcept {
  ControlFrame frame;
  frame.type = type;
  frame.calls = calls;
  if (const CallHistory::Record* last = history_.after(calls)) {
    frame.fingerprint = last->fingerprint;
    frame.digest = last->digest;
    transport::set_text(frame, last->plan->text());  // last->text() would allocate
    if (!last->shape.empty()) transport::set_text(frame, last->text());
  }
  return frame;
}

ControlFrame ControlPlane::position_frame() const {
  const Position position = position_();
  ControlFrame frame = frame_of(ControlType::kPosition, history_.calls());
  if (position.in_call) frame.flags |= transport::kInCall;
  frame.culprit = position.waits_for;
  frame.round = position.round;
  frame.segment = position.segment;
  if (position.job_peer != kNoPeer) {
    frame.flags |= transport::kInOtherCommunicator;
    frame.segment = static_cast<std::uint32_t>(position.job_peer);
  }
  frame.value = static_cast<std::uint64_t>(position.seconds * 1e3);
  return frame;
}

void ControlPlane::announce() {
  announce_at_ = Deadline::after(kPositionSeconds);
  const ControlFrame frame = position_frame();
  const bool sent_to_all = control_.broadcast(frame);
  if (sent_to_all && (frame.flags & transport::kInCall) == 0) unannounced_ = false;
}

// Sends the records of calls up to `call`, which the peer chose and may be any number, and then
// that of the latest call.
void ControlPlane::send_call_records(Rank to, std::uint32_t call) noexcept {
  for (std::uint32_t ago = kCallsSent; ago-- > 0;) {
    const CallHistory::Record* record = ago <= call ? history_.after(call + 1 - ago) : nullptr;
    if (record == nullptr) continue;
    ControlFrame answer = frame_of(ControlType::kAnswer, call + 1 - ago);
    answer.value = record->plan->bytes_to(to);
    control_.send(to, answer);
  }
  ControlFrame last = frame_of(ControlType::kAnswer, history_.calls());
  last.flags |= transport::kLast;
  control_.send(to, last);
}

void ControlPlane::say_goodbye(bool alone) noexcept {
  closing_ = true;
  ControlFrame frame = frame_of(ControlType::kBye, history_.calls());
  if (alone) frame.flags |= transport::kOnlyThisCommunicator;
  control_.broadcast(frame);
}

void ControlPlane::close_gracefully(const WaitLimit& wait_limit, const Deadline& together,
                                    bool alone) {
  say_goodbye(alone);
  const auto others_stay = [this] {
    for (Rank peer = 0; peer < size_; ++peer)
      if (is_present(peer)) return true;
    return false;
  };
  for (;;) {
    poll_while_closing();
    const Rank unheard = unconfirmed_peer();
    if (unheard != kNoPeer && wait_limit.passed()) throw close_timeout(unheard);
    if (unheard == kNoPeer && (!others_stay() || together.passed())) return;
    sleep(unheard == kNoPeer ? wait_limit.until(together) : wait_limit);
  }
}

void ControlPlane::close_now(bool alone) {
  say_goodbye(alone);
  poll_while_closing();
}

void ControlPlane::poll_while_closing() {
  while (const auto event = next_event()) take_while_closing(*event);
  compare_ends();
}

// Takes an event while this rank closes. A rank that failed for another reason than a mismatch will
// not report its calls any more.
void ControlPlane::take_while_closing(const ControlEvent& event) {
  const bool failed = event.frame.type == ControlType::kFailure;
  if (!failed || event.frame.kind == FailureKind::kInvalidArgument) return take(event);
  failed_while_closing_[at(event.from)] = true;
}

Timeout ControlPlane::close_timeout(Rank peer) const {
  std::string text = name_of(rank_) + ": close() timed out before " + name_of(peer) +
                     " had made all the calls of this rank";
  if (const CallHistory::Record* last = history_.after(history_.calls()))
    text +=
        ", the last of which is call " + std::to_string(history_.calls() - 1) + ", " + last->text();
  return {text + ". Is " + name_of(peer) + " alive, and does it make the same calls?", peer};
}

void ControlPlane::sleep(const WaitLimit& wait_limit) const {
  pollfd bell{control_.doorbell(), POLLIN, 0};
  ::poll(&bell, 1, wait_limit.turn_milliseconds());
  wait_limit.check_interrupt();
}

// ---- The root cause of a failure ---------------------------------------------------------------

void ControlPlane::query_positions() {
  ControlFrame frame = position_frame();
  frame.flags |= transport::kAsks;
  poll();  // a frame that was sent before the query is no answer to it
  queried_at_ = Clock::now();
  control_.broadcast(frame);
}

bool ControlPlane::all_replied() const {
  for (Rank peer = 0; peer < size_; ++peer)
    if (is_present(peer) && is_silent(peer)) return false;
  return true;
}

bool ControlPlane::awaits_replies(double seconds) const {
  return Clock::now() < queried_at_ + std::chrono::duration<double>(seconds) && !all_replied();
}

double ControlPlane::seconds_since_message_of(Rank peer) const {
  const Clock::time_point last = std::max(made_at_, last_position_of(peer).received_at);
  return std::chrono::duration<double>(Clock::now() - last).count();
}

std::string ControlPlane::text_of_position(Rank peer) const {
  const LastPosition& last = last_position_of(peer);
  if (last.received_at == Clock::time_point{})
    return name_of(peer) +
           " has said nothing: it is outside gradwire, or stopped, or cannot be reached";
  const ControlFrame& said = last.frame;
  if ((said.flags & transport::kInOtherCommunicator) != 0)
    return name_of(peer) + " waits in another group, for rank " + std::to_string(said.segment) +
           " of the job";
  const std::string call = "call " + std::to_string(said.calls - 1) + ", " + text_of(said);
  if (said.culprit != kNoPeer)
    return name_of(peer) + " waits for " + name_of(said.culprit) + " in " + call;
  if ((said.flags & transport::kInCall) != 0) return name_of(peer) + " is in " + call;
  return name_of(peer) + " was last heard of outside gradwire, having begun " +
         std::to_string(said.calls) + " calls";
}

ChainEnd ControlPlane::end_of_chain(Rank peer) const {
  Rank at = peer;
  for (int way = 0; way < size_ && at != kNoPeer && at != rank_; ++way) {
    const ControlFrame& said = last_position_of(at).frame;
    if (is_silent(at)) return {at};
    if (said.culprit == kNoPeer && (said.flags & transport::kInOtherCommunicator) != 0)
      return {kNoPeer, static_cast<Rank>(said.segment)};
    if (said.culprit == kNoPeer) return {at};
    at = said.culprit;
  }
  for (const bool silent : {true, false})
    for (Rank other = 0; other < size_; ++other)
      if (is_present(other) && (silent ? is_silent(other) : waits_for_nobody(other)))
        return {other};
  return {peer};
}

// Returns whether a rank has said that it is outside of any call, and waits for nobody.
bool ControlPlane::waits_for_nobody(Rank peer) const {
  const transport::ControlFrame& said = last_position_of(peer).frame;
  return said.culprit == kNoPeer &&
         (said.flags & (transport::kInCall | transport::kInOtherCommunicator)) == 0;
}

std::exception_ptr ControlPlane::root_cause(const std::exception_ptr& error,
                                            const Interrupt& interrupt) {
  try {
    std::rethrow_exception(error);
  } catch (const RootCause& cause) {
    return cause.error;
  } catch (const Disagreement& found) {
    return inquire(found, interrupt);
  } catch (const TransportError& e) {
    return ask_others(e.peer(), interrupt).value_or(error);
  } catch (...) {
    return error;
  }
}

std::optional<std::exception_ptr> ControlPlane::ask_others(Rank peer, const Interrupt& interrupt) {
  const WaitLimit wait_limit(Deadline::after(kRootCauseSeconds), interrupt);
  do {
    try {
      poll();
    } catch (...) {
      return root_cause(std::current_exception(), interrupt);
    }
    if (peer >= 0 && control_.said_bye(peer)) return closed_early(peer);
    sleep(wait_limit);
  } while (!wait_limit.passed());
  return std::nullopt;
}

std::exception_ptr ControlPlane::closed_early(Rank peer) const {
  const ControlFrame& bye = last_position_of(peer).frame;
  const std::uint32_t calls = bye.calls;
  std::string text = name_of(rank_) + ": " + name_of(peer) +
                     " closed its communicator, or ended its program, after " +
                     std::to_string(calls) + (calls == 1 ? " call" : " calls") +
                     ", while others still waited for it";
  if (const CallHistory::Record* own = history_.after(history_.calls()))
    text += " in call " + std::to_string(history_.calls() - 1) + ", " + own->text();
  return std::make_exception_ptr(
      TransportError(text + "; did all ranks make the same calls?", peer, kNoPeer,
                     (bye.flags & transport::kOnlyThisCommunicator) != 0));
}

// ---- Who called what ---------------------------------------------------------------------------

std::exception_ptr ControlPlane::inquire(const Disagreement& found, const Interrupt& interrupt) {
  MismatchReport report = start_report(found.call);
  ControlFrame question = frame_of(ControlType::kInquiry, history_.calls());
  question.value = found.call;
  control_.broadcast(question);
  for (const WaitLimit wait_limit(Deadline::after(kInquirySeconds), interrupt);;) {
    while (const auto event = next_event())
      if (auto failure = add_answer(report, *event)) return failure;
    mark_gone(report);
    if (report.is_complete() || wait_limit.passed()) break;
    sleep(wait_limit);
  }
  std::string summary = report.summary();
  if (summary.empty()) summary = size_text(found, report);
  return std::make_exception_ptr(InvalidArgument(
      summary + "; all ranks must make the same calls in the same order, with the same sizes"));
}

// Returns a text that names both sizes, if the sender has answered with its own; else `found.what`.
std::string ControlPlane::size_text(const Disagreement& found, const MismatchReport& report) const {
  const CallHistory::Record* own = history_.after(found.call + 1);
  const auto sent = found.sender == kNoPeer ? std::nullopt : report.value(found.call, found.sender);
  if (own == nullptr || !sent || *sent == found.expected) return found.what;
  const auto size = [own](std::uint64_t bytes) {
    const std::string text = std::to_string(bytes) + " bytes";
    const OpSpec& spec = own->plan->spec();
    if (!spec.moved.empty() || size_of(spec.dtype) == 1) return text;
    return text + " (" + std::to_string(bytes / size_of(spec.dtype)) + " of " +
           std::string(name_of(spec.dtype)) + ")";
  };
  return "ranks disagree in call " + std::to_string(found.call) + ", " + own->text() + ": " +
         name_of(found.sender) + " sends " + name_of(rank_) + " " + size(*sent) + ", and " +
         name_of(rank_) + " expects " + size(found.expected);
}

// Returns a report of what is known already.
MismatchReport ControlPlane::start_report(std::uint32_t call) const {
  MismatchReport report(size_);
  for (std::uint32_t ago = 0; ago < kCallsSent && ago <= call; ++ago)
    if (history_.after(call + 1 - ago) != nullptr)
      report.add(rank_, frame_of(ControlType::kAnswer, call + 1 - ago));
  if (closing_) report.add(rank_, frame_of(ControlType::kBye, history_.calls()));
  for (Rank peer = 0; peer < size_; ++peer) {
    report.add(peer, last_position_of(peer).frame);
  }
  return report;
}

// Marks the ranks that can send nothing more. A rank that has only said BYE may still wait for
// others, and answers meanwhile.
void ControlPlane::mark_gone(MismatchReport& report) const {
  for (Rank peer = 0; peer < size_; ++peer)
    if (!control_.connected(peer)) report.mark_final(peer);
}

// Adds one event to the report. Returns another rank's failure, which ends the inquiry.
std::exception_ptr ControlPlane::add_answer(MismatchReport& report, const ControlEvent& event) {
  const ControlFrame& frame = event.frame;
  const bool ends =
      event.gone || (frame.type == ControlType::kAnswer && (frame.flags & transport::kLast) != 0);
  if (ends) report.mark_final(event.from);
  if (event.gone) return nullptr;
  if (frame.type == ControlType::kFailure) return error_of(frame);
  report.add(event.from, frame);
  if (frame.type == ControlType::kInquiry)
    send_call_records(event.from, static_cast<std::uint32_t>(frame.value));
  return nullptr;
}

}  // namespace gradwire::exec
