// EmulatedLink: the emulated NIC of a rank. All messages that the rank sends share its rate; all
// that it receives share the same rate once more (full duplex). Every bit takes the latency. The
// link delays nothing itself: it computes when a message would have arrived.
//
// Any thread may use it: all communicators of a rank share one.
#pragma once

#include <chrono>
#include <mutex>
#include <string_view>

#include "gradwire/base/deadline.h"
#include "gradwire/transport/kind.h"

namespace gradwire::transport {

class EmulatedLink final : public TransportContext {
 public:
  using Time = Deadline::Clock::time_point;  // CLOCK_MONOTONIC: the same for all ranks of a host
  // When the first and the last bit of a message reach the receiver's NIC.
  struct Flight {
    Time first;
    Time last;
  };

  // Parses "1gbit,100us": a rate and a one-way latency (none where left out), in the units of
  // Linux's tc. Throws InvalidArgument.
  explicit EmulatedLink(std::string_view spec);

  // Sends a message now, to `copies` peers at once.
  Flight send(std::size_t bytes, std::size_t copies);
  // Returns when all of a message is received whose first bit has arrived: after all messages that
  // arrived before it.
  Time receive(const Flight& flight, std::size_t bytes);

  // For cost models: seconds per byte of a large message, packet headers included; and the one-way
  // latency in seconds.
  double seconds_of_byte() const;
  double seconds_under_way() const { return std::chrono::duration<double>(latency_).count(); }

 private:
  Deadline::Clock::duration time_of(std::size_t bytes) const;

  double bits_per_second_ = 0;
  Deadline::Clock::duration latency_{};
  std::mutex mutex_;
  Time sends_until_;
  Time receives_until_;
};

}  // namespace gradwire::transport
