#include "gradwire/exec/control/control_plane.h"

#include <poll.h>

#include <algorithm>

namespace gradwire::exec {
namespace {

using transport::ControlEvent;
using transport::ControlFrame;
using transport::ControlType;
using transport::FailureKind;

// How long a failed link waits for the others to name the root cause, and an inquest for answers.
constexpr double kRootCauseSeconds = 0.5;
constexpr double kInquestSeconds = 0.5;
// How often calls that go on are told of.
constexpr double kTellSeconds = 0.1;
// An answer tells of so many calls before the one in question.
constexpr std::uint32_t kCallsTold = 16;

std::string name(Rank rank) { return "rank " + std::to_string(rank); }

}  // namespace

ControlPlane::ControlPlane(Rank rank, int size, std::function<Position()> position)
    : rank_(rank),
      size_(size),
      position_(std::move(position)),
      control_(rank, size),
      words_(static_cast<std::size_t>(size)),
      gave_up_(static_cast<std::size_t>(size)) {}

// ---- Calls -------------------------------------------------------------------------------------

void ControlPlane::begin_call(std::shared_ptr<const Plan> plan, const CallShape& shape) {
  history_.add(std::move(plan), shape);
  if (std::exchange(some_are_ahead_, false))
    for (Rank peer = 0; peer < size_; ++peer) compare(peer);
  if (!tell_at_.passed_about()) return;
  listen();
  announce();
}

bool ControlPlane::end_call() noexcept {
  const CallHistory::Entry* last = history_.after(history_.calls());
  const bool by_data = last != nullptr && last->plan->hears_all();
  if (by_data) settled_ = history_.calls();
  untold_ = !by_data && size_ > 1;
  return untold_;
}

Rank ControlPlane::unsettled_peer() const {
  if (settled_ == history_.calls()) return kNoPeer;
  for (Rank peer = 0; peer < size_; ++peer) {
    const ControlFrame& told = last_word_of(peer).frame;
    const std::uint32_t begun = (told.flags & transport::kInCall) != 0 ? 1 : 0;
    const auto behind = static_cast<std::int32_t>(history_.calls() - (told.calls - begun));
    if (is_present(peer) && !gave_up_[static_cast<std::size_t>(peer)] && behind > 0) return peer;
  }
  return kNoPeer;
}

// What a peer said last of its calls with this rank's own, where both have begun them.
void ControlPlane::compare(Rank peer) {
  const ControlFrame& told = last_word_of(peer).frame;
  if (told.calls == 0) return;
  if (static_cast<std::int32_t>(told.calls - history_.calls()) > 0) {
    some_are_ahead_ = true;
    return;
  }
  const CallHistory::Entry* own = history_.after(told.calls);
  if (own != nullptr && own->digest != told.digest)
    throw Disagreement{told.calls - 1, name(peer) + " called " + text_of(told) + " as its call " +
                                           std::to_string(told.calls - 1) + ", and " + name(rank_) +
                                           " other calls up to there"};
}

// Of ranks that have left: no call of theirs is to come.
void ControlPlane::compare_ends() const {
  for (Rank peer = 0; peer < size_; ++peer) {
    const std::uint32_t calls = last_word_of(peer).frame.calls;
    if (peer != rank_ && control_.said_bye(peer) && calls != history_.calls())
      throw Disagreement{std::min(calls, history_.calls()),
                         name(peer) + " left after " + std::to_string(calls) + " calls, " +
                             name(rank_) + " after " + std::to_string(history_.calls())};
  }
}

// ---- What is said and heard --------------------------------------------------------------------

void ControlPlane::listen() {
  while (const auto event = control_.poll()) take(*event);
}

void ControlPlane::take(const ControlEvent& event) {
  const ControlFrame& frame = event.frame;
  if (frame.type == ControlType::kFailure) throw RootCause{error_of(frame)};
  if (frame.type == ControlType::kInquiry)
    return testify(event.from, static_cast<std::uint32_t>(frame.value));
  if (frame.type == ControlType::kAnswer) return;  // it came too late
  words_[static_cast<std::size_t>(event.from)] = {frame, Clock::now()};
  if ((frame.flags & transport::kAsks) != 0) control_.send(event.from, position_frame());
  compare(event.from);
}

// Tells of the first `calls` calls; only the last ones are known.
ControlFrame ControlPlane::frame_of(ControlType type, std::uint32_t calls) const noexcept {
  ControlFrame frame;
  frame.type = type;
  frame.calls = calls;
  if (const CallHistory::Entry* last = history_.after(calls)) {
    frame.fingerprint = last->fingerprint;
    frame.digest = last->digest;
    transport::set_text(frame, last->plan->text());  // a copy would be an allocation
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
  frame.value = static_cast<std::uint64_t>(position.seconds * 1e3);
  return frame;
}

void ControlPlane::announce() {
  tell_at_ = Deadline::after(kTellSeconds);
  const ControlFrame frame = position_frame();
  const bool told = control_.broadcast(frame);
  if (told && (frame.flags & transport::kInCall) == 0) untold_ = false;
}

// The calls up to `call`, any number that a peer may name, then the last of all.
void ControlPlane::testify(Rank to, std::uint32_t call) noexcept {
  for (std::uint32_t ago = kCallsTold; ago-- > 0;) {
    const CallHistory::Entry* told = ago <= call ? history_.after(call + 1 - ago) : nullptr;
    if (told == nullptr) continue;
    ControlFrame answer = frame_of(ControlType::kAnswer, call + 1 - ago);
    answer.value = told->plan->bytes_to(to);
    control_.send(to, answer);
  }
  ControlFrame last = frame_of(ControlType::kAnswer, history_.calls());
  last.flags |= transport::kLast;
  control_.send(to, last);
}

void ControlPlane::say_failure(const std::exception_ptr& error) noexcept {
  control_.broadcast(failure_frame(error, rank_));
}

void ControlPlane::take_leave(const Patience& patience, const Deadline& together) {
  leaving_ = true;
  control_.broadcast(frame_of(ControlType::kBye, history_.calls()));
  const auto others_stay = [this] {
    for (Rank peer = 0; peer < size_; ++peer)
      if (is_present(peer)) return true;
    return false;
  };
  for (;;) {
    hear_leaving();
    const Rank unheard = unsettled_peer();
    if (unheard != kNoPeer && patience.passed()) throw unsettled(unheard);
    if (unheard == kNoPeer && (!others_stay() || together.passed())) return;
    rest(unheard == kNoPeer ? patience.until(together) : patience);
  }
}

void ControlPlane::leave_at_once() {
  leaving_ = true;
  control_.broadcast(frame_of(ControlType::kBye, history_.calls()));
  hear_leaving();
}

void ControlPlane::hear_leaving() {
  while (const auto event = control_.poll()) take_leaving(*event);
  compare_ends();
}

// Whoever has failed for another reason says nothing more of its calls.
void ControlPlane::take_leaving(const ControlEvent& event) {
  const bool failed = event.frame.type == ControlType::kFailure;
  if (!failed || event.frame.kind == FailureKind::kInvalidArgument) return take(event);
  gave_up_[static_cast<std::size_t>(event.from)] = true;
}

Timeout ControlPlane::unsettled(Rank peer) const {
  std::string text = name(rank_) + ": close() timed out before " + name(peer) +
                     " had made all the calls of this rank";
  if (const CallHistory::Entry* last = history_.after(history_.calls()))
    text +=
        ", the last of which is call " + std::to_string(history_.calls() - 1) + ", " + last->text();
  return {text + ". Is " + name(peer) + " alive, and does it make the same calls?", peer};
}

void ControlPlane::rest(const Patience& patience) const {
  pollfd bell{control_.doorbell(), POLLIN, 0};
  ::poll(&bell, 1, patience.turn_milliseconds());
  patience.require();
}

// ---- Who is to blame ---------------------------------------------------------------------------

void ControlPlane::call_roll() {
  ControlFrame frame = position_frame();
  frame.flags |= transport::kAsks;
  listen();  // what was said before the question is no answer
  roll_called_ = Clock::now();
  control_.broadcast(frame);
}

bool ControlPlane::roll_is_complete() const {
  for (Rank peer = 0; peer < size_; ++peer)
    if (is_present(peer) && is_silent(peer)) return false;
  return true;
}

Rank ControlPlane::end_of_chain(Rank peer) const {
  Rank at = peer;
  for (int way = 0; way < size_ && at != kNoPeer && at != rank_; ++way) {
    const Rank next = last_word_of(at).frame.culprit;
    if (is_silent(at) || next == kNoPeer) return at;
    at = next;
  }
  for (Rank other = 0; other < size_; ++other)
    if (is_present(other) && is_silent(other)) return other;
  return peer;
}

std::exception_ptr ControlPlane::root_cause(const std::exception_ptr& error,
                                            const Interrupt& interrupt) {
  try {
    std::rethrow_exception(error);
  } catch (const RootCause& told) {
    return told.error;
  } catch (const Disagreement& found) {
    return inquire(found, interrupt);
  } catch (const TransportError& e) {
    return others_say(e.peer(), interrupt).value_or(error);
  } catch (...) {
    return error;
  }
}

std::optional<std::exception_ptr> ControlPlane::others_say(Rank peer, const Interrupt& interrupt) {
  const Patience patience(Deadline::after(kRootCauseSeconds), interrupt);
  do {
    try {
      listen();
    } catch (...) {
      return root_cause(std::current_exception(), interrupt);
    }
    if (peer >= 0 && control_.said_bye(peer)) return left_in_peace(peer);
    rest(patience);
  } while (!patience.passed());
  return std::nullopt;
}

std::exception_ptr ControlPlane::left_in_peace(Rank peer) const {
  const std::uint32_t calls = last_word_of(peer).frame.calls;
  std::string text = name(rank_) + ": " + name(peer) +
                     " closed its communicator, or ended its program, after " +
                     std::to_string(calls) + (calls == 1 ? " call" : " calls") +
                     ", while others still waited for it";
  if (const CallHistory::Entry* own = history_.after(history_.calls()))
    text += " in call " + std::to_string(history_.calls() - 1) + ", " + own->text();
  return std::make_exception_ptr(
      TransportError(text + "; did all ranks make the same calls?", peer));
}

// ---- Who called what ---------------------------------------------------------------------------

std::exception_ptr ControlPlane::inquire(const Disagreement& found, const Interrupt& interrupt) {
  Inquest inquest = open_inquest(found.call);
  ControlFrame question = frame_of(ControlType::kInquiry, history_.calls());
  question.value = found.call;
  control_.broadcast(question);
  for (const Patience patience(Deadline::after(kInquestSeconds), interrupt);;) {
    while (const auto event = control_.poll())
      if (auto failure = hear(inquest, *event)) return failure;
    dismiss_gone(inquest);
    if (inquest.is_over() || patience.passed()) break;
    rest(patience);
  }
  std::string verdict = inquest.verdict();
  if (verdict.empty()) verdict = size_text(found, inquest);
  return std::make_exception_ptr(InvalidArgument(
      verdict + "; all ranks must make the same calls in the same order, with the same sizes"));
}

// By what the sender says of the block, where it does.
std::string ControlPlane::size_text(const Disagreement& found, const Inquest& inquest) const {
  const CallHistory::Entry* own = history_.after(found.call + 1);
  const auto sent =
      found.sender == kNoPeer ? std::nullopt : inquest.value(found.call, found.sender);
  if (own == nullptr || !sent || *sent == found.expected) return found.what;
  const auto size = [own](std::uint64_t bytes) {
    const std::string text = std::to_string(bytes) + " bytes";
    const OpSpec& spec = own->plan->spec();
    if (!spec.moved.empty() || size_of(spec.dtype) == 1) return text;
    return text + " (" + std::to_string(bytes / size_of(spec.dtype)) + " of " +
           std::string(name_of(spec.dtype)) + ")";
  };
  return "ranks disagree in call " + std::to_string(found.call) + ", " + own->text() + ": " +
         name(found.sender) + " sends " + name(rank_) + " " + size(*sent) + ", and " + name(rank_) +
         " expects " + size(found.expected);
}

// With what is known already.
Inquest ControlPlane::open_inquest(std::uint32_t call) const {
  Inquest inquest(size_);
  for (std::uint32_t ago = 0; ago < kCallsTold && ago <= call; ++ago)
    if (history_.after(call + 1 - ago) != nullptr)
      inquest.hear(rank_, frame_of(ControlType::kAnswer, call + 1 - ago));
  if (leaving_) inquest.hear(rank_, frame_of(ControlType::kBye, history_.calls()));
  for (Rank peer = 0; peer < size_; ++peer) {
    inquest.hear(peer, last_word_of(peer).frame);
  }
  return inquest;
}

// Who has said BYE may wait for others still, and then it answers.
void ControlPlane::dismiss_gone(Inquest& inquest) const {
  for (Rank peer = 0; peer < size_; ++peer)
    if (!control_.connected(peer)) inquest.dismiss(peer);
}

// What one event adds to it; the failure of another, which ends it.
std::exception_ptr ControlPlane::hear(Inquest& inquest, const ControlEvent& event) {
  const ControlFrame& frame = event.frame;
  const bool ends =
      event.gone || (frame.type == ControlType::kAnswer && (frame.flags & transport::kLast) != 0);
  if (ends) inquest.dismiss(event.from);
  if (event.gone) return nullptr;
  if (frame.type == ControlType::kFailure) return error_of(frame);
  inquest.hear(event.from, frame);
  if (frame.type == ControlType::kInquiry)
    testify(event.from, static_cast<std::uint32_t>(frame.value));
  return nullptr;
}

}  // namespace gradwire::exec
