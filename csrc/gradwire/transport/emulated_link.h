// EmulatedLink: the NIC that a rank would have. All that the rank sends shares its rate,
// and so does, apart from that, all that it receives; every bit is under way for its latency.
// Nothing is held back here: the link only says when a message would have arrived.
//
// Any thread: a rank's communicators, and both lanes of each, share one.
#pragma once

#include <chrono>
#include <mutex>
#include <string_view>

#include "gradwire/base/deadline.h"
#include "gradwire/transport/context.h"

namespace gradwire::transport {

class EmulatedLink final : public Context {
 public:
  using Time = Deadline::Clock::time_point;  // CLOCK_MONOTONIC: the same for all ranks of a host
  // When the first and the last bit of a message reach the receiver's NIC.
  struct Flight {
    Time first;
    Time last;
  };

  // "1gbit,100us": a rate and a latency one way (none where left out), in the units of Linux's tc.
  // Throws InvalidArgument.
  explicit EmulatedLink(std::string_view spec);

  // A message that is sent now, to `copies` peers at once.
  Flight send(std::size_t bytes, std::size_t copies);
  // When all of a message is received whose first bit has come: not before what came earlier.
  Time receive(const Flight& flight, std::size_t bytes);

  // For predictions: seconds for a byte among many, with its packets' headers, and for each bit.
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
