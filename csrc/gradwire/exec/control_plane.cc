#include "gradwire/exec/control_plane.h"

#include <poll.h>

#include <utility>

#include "gradwire/base/error.h"
#include "gradwire/exec/failure.h"

namespace gradwire::exec {
namespace {

using transport::ControlEvent;
using transport::ControlFrame;
using transport::ControlType;

// How long a failed link waits for the others to name the root cause.
constexpr double kRootCauseSeconds = 0.5;
constexpr int kPollMilliseconds = 100;

}  // namespace

ControlPlane::ControlPlane(Rank rank, int size, std::function<Position()> position)
    : rank_(rank),
      size_(size),
      position_(std::move(position)),
      control_(rank, size),
      words_(static_cast<std::size_t>(size)) {}

void ControlPlane::listen() {
  while (const auto event = control_.poll()) take(*event);
}

void ControlPlane::take(const ControlEvent& event) {
  const ControlFrame& frame = event.frame;
  if (frame.type == ControlType::kFailure) throw RootCause{error_of(frame)};
  words_[static_cast<std::size_t>(event.from)] = {frame, Clock::now()};
}

// With what this rank has called so far.
ControlFrame ControlPlane::frame_of(ControlType type) const noexcept {
  ControlFrame frame;
  frame.type = type;
  frame.calls = history_.calls();
  if (const auto* last = history_.after(frame.calls)) {
    frame.fingerprint = last->plan->fingerprint();
    frame.digest = last->digest;
    transport::set_text(frame, last->plan->text());
  }
  return frame;
}

void ControlPlane::announce() {
  const Position position = position_();
  ControlFrame frame = frame_of(ControlType::kPosition);
  if (position.in_call) frame.flags |= transport::kInCall;
  frame.culprit = position.waits_for;
  frame.round = position.round;
  frame.segment = position.segment;
  frame.value = static_cast<std::uint64_t>(position.seconds * 1e3);
  control_.broadcast(frame);
}

Rank ControlPlane::end_of_chain(Rank peer) const {
  for (int step = 0; step < size_; ++step) {
    const Rank next = peer == kNoPeer ? kNoPeer : last_word_of(peer).frame.culprit;
    if (next == kNoPeer || next == rank_) break;
    peer = next;
  }
  return peer;
}

std::exception_ptr ControlPlane::root_cause(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const TransportError& e) {
    return others_say(e.peer()).value_or(error);
  } catch (...) {
    return error;
  }
}

std::optional<std::exception_ptr> ControlPlane::others_say(Rank peer) {
  const Deadline deadline = Deadline::after(kRootCauseSeconds);
  do {
    try {
      listen();
    } catch (const RootCause& told) {
      return told.error;
    }
    if (peer >= 0 && control_.said_bye(peer)) return left_in_peace(peer);
    pollfd fd{control_.doorbell(), POLLIN, 0};
    ::poll(&fd, 1, deadline.milliseconds_left(kPollMilliseconds));
  } while (!deadline.passed());
  return std::nullopt;
}

std::exception_ptr ControlPlane::left_in_peace(Rank peer) const {
  return std::make_exception_ptr(TransportError(
      "rank " + std::to_string(rank_) + ": rank " + std::to_string(peer) +
          " closed its communicator while this rank still waited for it; did all ranks make "
          "the same calls?",
      peer));
}

void ControlPlane::say_failure(const std::exception_ptr& error) noexcept {
  control_.broadcast(failure_frame(error, rank_));
}

void ControlPlane::say_bye() { control_.broadcast(frame_of(ControlType::kBye)); }

}  // namespace gradwire::exec
