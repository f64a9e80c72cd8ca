// Counting: an observer that adds what is reported to Totals, and passes it on to another observer.
// A call that never waits costs two readings of the clock, and each wait two more.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "gradwire/base/error.h"
#include "gradwire/exec/control/observer.h"
#include "gradwire/exec/trace/totals.h"

namespace gradwire::exec {

class Counting final : public Observer {
 public:
  // `next` may be null.
  Counting(std::shared_ptr<Totals> totals, std::shared_ptr<Observer> next)
      : totals_(std::move(totals)), next_(std::move(next)) {}

  Submission submitted(const Request& request) noexcept override;
  void blocked(std::chrono::steady_clock::time_point since) noexcept override;
  void started(const Submission& submission) noexcept override;
  void phase(const Plan& plan, std::uint32_t operation) noexcept override;
  void awaits(Rank peer, bool reads) noexcept override;
  void moves() noexcept override;
  void sent(const Plan& plan, const Frame& frame, std::size_t bytes,
            const CodecTime& spent) noexcept override;
  void received(const Plan& plan, std::span<const ReceiveFrame> frames, std::size_t bytes,
                const CodecTime& spent) noexcept override;
  void moved(const MessageFrame& frame) noexcept override;
  void computed(const CodecTime& spent) noexcept override;
  void phase_over() noexcept override;
  void ended(const std::exception_ptr& failure) noexcept override;
  void failed(transport::FailureKind kind, Rank job_peer) noexcept override;

 private:
  void end_wait(Rank peer, Count Totals::Peer::* count, std::uint64_t end) noexcept;
  void end_wait_of_phase() noexcept;

  const std::shared_ptr<Totals> totals_;
  const std::shared_ptr<Observer> next_;

  // Of the call under way; times are nanoseconds of steady_clock.
  Submission call_;
  std::uint64_t began_ = 0;
  std::uint64_t sent_bytes_ = 0;
  unsigned idle_ = 0;         // how often awaits() was called since the last work
  std::uint64_t since_ = 0;   // when the wait began; 0: there is none
  std::uint64_t worked_ = 0;  // when work began after it
  Rank sender_ = kNoPeer, reader_ = kNoPeer;
};

}  // namespace gradwire::exec
