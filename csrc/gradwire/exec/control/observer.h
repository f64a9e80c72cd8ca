// Observer: receives what a communicator reports of its calls while they run, for traces and
// metrics. Without an observer each call, and each of its frames, costs one comparison more. An
// interface, since traces are in a layer above, and programs may listen otherwise.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>

#include "gradwire/base/types.h"
#include "gradwire/exec/plan/plan.h"
#include "gradwire/exec/plan/request.h"
#include "gradwire/transport/control.h"

namespace gradwire::exec {

// Seconds in a codec, on the threads that ran it.
struct CodecTime {
  double encode = 0;
  double decode = 0;
};

// A frame of a message of send and recv.
struct MessageFrame {
  bool sent = false;  // else received
  Rank peer = 0;
  std::uint32_t message = 0;  // its number among those between the two ranks, in that direction
  std::uint32_t frame = 0;    // its number in the message
  std::size_t bytes = 0;      // on the wire, header included
};

inline constexpr std::uint32_t kNoSeries = ~0U;

// What an observer remembers of a call from its submission until its turn comes.
struct Submission {
  std::uint64_t at = 0;              // nanoseconds of steady_clock
  std::uint64_t label = 0;           // the observer's own
  std::uint64_t bytes = 0;           // of the caller's inputs
  std::uint32_t series = kNoSeries;  // of Totals
};

// Collectives of one communicator run one after the other, and each is reported in this order:
//   started, then for each phase: phase, (awaits..., moves, sent or received)..., phase_over; at
//   last ended.
// The thread that drives calls these. Callers' threads call submitted() and blocked(), one thread
// at a time. No function may throw, block, or call the communicator.
class Observer {
 public:
  virtual ~Observer() = default;

  // A call is submitted on this rank. started() gets what this returns.
  virtual Submission submitted(const Request& request) noexcept = 0;
  // A thread has waited since then for a call of its own.
  virtual void blocked(std::chrono::steady_clock::time_point since) noexcept = 0;

  // A collective gets its turn on this rank.
  virtual void started(const Submission& submission) noexcept = 0;
  // The collective begins a plan: its own, or that of one of the collectives that it is made of.
  virtual void phase(const Plan& plan, std::uint32_t operation) noexcept = 0;
  // Nothing can be done before that rank sends or, if `reads`, has read what was sent to it. May be
  // called repeatedly while the wait lasts.
  virtual void awaits(Rank peer, bool reads) noexcept = 0;
  // Work begins: on frames, on a message of send or recv, or on local data between two phases.
  virtual void moves() noexcept = 0;
  // The work that began has staged a frame, or landed one or more that add to the same elements.
  // `bytes`: of one frame on the wire, header included. `spent`: in the codec in this phase so far.
  virtual void sent(const Plan& plan, const Frame& frame, std::size_t bytes,
                    const CodecTime& spent) noexcept = 0;
  virtual void received(const Plan& plan, std::span<const ReceiveFrame> frames, std::size_t bytes,
                        const CodecTime& spent) noexcept = 0;
  virtual void moved(const MessageFrame& frame) noexcept = 0;
  // The work that began was local: before, between or after the phases.
  virtual void computed(const CodecTime& spent) noexcept = 0;
  virtual void phase_over() noexcept = 0;
  // This rank's part of the collective is over. `failure` is the communicator's, if that ended it,
  // else null.
  virtual void ended(const std::exception_ptr& failure) noexcept = 0;
  // The communicator fails, in a call or outside; `job_peer` is the culprit's rank in the job.
  virtual void failed(transport::FailureKind /*kind*/, Rank /*job_peer*/) noexcept {}
};

}  // namespace gradwire::exec
