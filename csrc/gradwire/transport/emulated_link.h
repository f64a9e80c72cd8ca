// EmulatedLink: the emulated NIC of a rank. All messages that the rank sends share its rate, and so
// do, separately, all that it receives; every bit takes its latency. Nothing is held back here: the
// link only says when a message would have arrived.
//
// Any thread may use it: a rank's communicators, and both lanes of each, share one.
#pragma once

#include <chrono>
#include <mutex>
#include <string_view>

#include "gradwire/base/deadline.h"
#include "gradwire/transport/kind.h"

namespace gradwire::transport {

class EmulatedLink final : public Context {
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

  // For predictions: the seconds of one byte among many, with its packets' headers; and the latency
  // of each bit.
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
