// Recorder: an observer that keeps what is reported as events, in a ring of fixed size. It
// allocates only when a label or a plan is new, and takes a lock only then and when a call is
// submitted.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "gradwire/base/error.h"
#include "gradwire/exec/control/observer.h"
#include "gradwire/exec/trace/event_ring.h"

namespace gradwire::exec {

class Recorder final : public Observer {
 public:
  // Keeps the last `events` events, and as many again of threads that wait for calls. `skew`
  // (nanoseconds) is added to the clock, for tests.
  explicit Recorder(std::size_t events, std::int64_t skew = 0);

  struct Events {
    std::vector<Event> events;  // in the order in which they ended; those of threads come last
    std::uint64_t dropped = 0;  // events that came before them
    std::map<std::uint64_t, std::string> labels;
    std::uint64_t unlabelled = 0;  // texts for which there was no room
  };
  // May be called from any thread, also while calls run.
  Events read() const;

  Submission submitted(const Request& request) noexcept override;
  void blocked(std::chrono::steady_clock::time_point since) noexcept override;
  void started(const Submission& submission) noexcept override;
  void phase(const Plan& plan, std::uint32_t operation) noexcept override;
  void moves() noexcept override { begin_ = now(); }
  void sent(const Plan& plan, const Frame& frame, std::size_t bytes,
            const CodecTime& spent) noexcept override;
  void received(const Plan& plan, std::span<const ReceiveFrame> frames, std::size_t bytes,
                const CodecTime& spent) noexcept override;
  void moved(const MessageFrame& frame) noexcept override;
  void computed(const CodecTime& spent) noexcept override;
  void awaits(Rank peer, bool reads) noexcept override { (reads ? reader_ : sender_) = peer; }
  void phase_over() noexcept override;
  void ended(const std::exception_ptr& failure) noexcept override;

 private:
  using Clock = std::chrono::steady_clock;
  std::uint64_t at(Clock::time_point time) const noexcept;
  std::uint64_t now() const noexcept { return at(Clock::now()); }
  void wait_until(std::uint64_t end, Rank peer, std::uint8_t flags) noexcept;
  void charge(Event& event, const CodecTime& spent) noexcept;
  void finish_work(Event& event) noexcept;
  bool describe(std::uint64_t label, const std::string& text) noexcept;
  void describe_plan(const Plan& plan) noexcept;

  const std::uint64_t skew_;
  EventRing events_;
  EventRing waits_;  // of threads of the program: written under the communicator's mutex

  // The driver's own.
  Event call_, phase_;
  CodecTime charged_;                         // time in codecs that events of this phase have
  std::uint64_t begin_ = 0;                   // of the work under way
  std::uint64_t idle_ = 0;                    // when work last ended
  Rank sender_ = kNoPeer, reader_ = kNoPeer;  // for whom this rank has waited since then
  bool in_phase_ = false;
  std::vector<std::uint32_t> known_plans_;  // by their fingerprints' low bits

  mutable std::mutex mutex_;  // guards the labels
  std::unordered_map<std::uint64_t, std::string> labels_;
  std::uint64_t unlabelled_ = 0;
};

}  // namespace gradwire::exec
