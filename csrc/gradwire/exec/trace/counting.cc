#include "gradwire/exec/trace/counting.h"

namespace gradwire::exec {
namespace {

// So many turns in a row that move nothing are a wait. Fewer are the driver's own: not worth
// reading the clock.
constexpr unsigned kTurnsOfWait = 4;

std::uint64_t now() noexcept {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<std::uint64_t>(std::chrono::nanoseconds(time).count());
}

}  // namespace

Submission Counting::submitted(const Request& request) noexcept {
  Submission made = next_ ? next_->submitted(request) : Submission{};
  made.bytes = input_bytes(request);
  made.series = totals_->series_of(request);
  return made;
}

void Counting::blocked(std::chrono::steady_clock::time_point since) noexcept {
  if (next_) next_->blocked(since);
}

void Counting::started(const Submission& submission) noexcept {
  call_ = submission;
  sent_bytes_ = 0;
  began_ = now();
  if (next_) next_->started(submission);
}

void Counting::phase(const Plan& plan, std::uint32_t operation) noexcept {
  idle_ = 0;
  since_ = 0;
  sender_ = reader_ = kNoPeer;
  if (next_) next_->phase(plan, operation);
}

void Counting::awaits(Rank peer, bool reads) noexcept {
  (reads ? reader_ : sender_) = peer;
  if (++idle_ == kTurnsOfWait) since_ = now();
  if (next_) next_->awaits(peer, reads);
}

void Counting::moves() noexcept {
  if (since_ != 0) worked_ = now();
  if (next_) next_->moves();
}

// Charges a wait that has ended to a peer, if this rank has waited for one.
void Counting::end_wait(Rank peer, Count Totals::Peer::* count, std::uint64_t end) noexcept {
  if (since_ != 0 && peer != kNoPeer) (totals_->peers[at(peer)].*count).add(end - since_);
  idle_ = 0;
  since_ = 0;
  sender_ = reader_ = kNoPeer;
}

void Counting::sent(const Plan& plan, const Frame& frame, std::size_t bytes,
                    const CodecTime& spent) noexcept {
  end_wait(reader_, &Totals::Peer::full_nanoseconds, worked_);
  for (const Rank peer : plan.peers(frame)) {
    totals_->peers[at(peer)].sent_bytes.add(bytes);
    sent_bytes_ += bytes;
  }
  if (next_) next_->sent(plan, frame, bytes, spent);
}

void Counting::received(const Plan& plan, std::span<const ReceiveFrame> frames, std::size_t bytes,
                        const CodecTime& spent) noexcept {
  end_wait(sender_, &Totals::Peer::late_nanoseconds, worked_);
  for (const Frame& frame : frames)
    totals_->peers[at(plan.peers(frame)[0])].received_bytes.add(bytes);
  if (next_) next_->received(plan, frames, bytes, spent);
}

void Counting::moved(const MessageFrame& frame) noexcept {
  Totals::Peer& peer = totals_->peers[at(frame.peer)];
  (frame.sent ? peer.sent_bytes : peer.received_bytes).add(frame.bytes);
  if (frame.frame == 0) (frame.sent ? peer.sends : peer.receives).add(1);
  if (next_) next_->moved(frame);
}

void Counting::computed(const CodecTime& spent) noexcept {
  if (next_) next_->computed(spent);
}

void Counting::phase_over() noexcept {
  end_wait_of_phase();
  if (next_) next_->phase_over();
}

void Counting::end_wait_of_phase() noexcept {
  if (since_ == 0) return;
  if (sender_ != kNoPeer)
    end_wait(sender_, &Totals::Peer::late_nanoseconds, now());
  else
    end_wait(reader_, &Totals::Peer::full_nanoseconds, now());
}

void Counting::ended(const std::exception_ptr& failure) noexcept {
  end_wait_of_phase();
  if (call_.series != kNoSeries) {
    Totals::Calls& calls = totals_->calls(call_.series);
    calls.calls.add(1);
    if (failure) calls.failed.add(1);
    calls.nanoseconds.add(now() - began_);
    calls.input_bytes.add(call_.bytes);
    calls.sent_bytes.add(sent_bytes_);
  }
  if (next_) next_->ended(failure);
}

void Counting::failed(transport::FailureKind kind, Rank job_peer) noexcept {
  totals_->fail({kind, job_peer});
  if (next_) next_->failed(kind, job_peer);
}

}  // namespace gradwire::exec
