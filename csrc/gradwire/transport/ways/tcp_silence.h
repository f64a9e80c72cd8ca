// What Linux knows of a TCP socket whose other end says nothing.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

namespace gradwire::transport {

struct TcpSilence {
  std::uint64_t acknowledged = 0;  // bytes, so far
  bool awaits = false;             // bytes were sent and not acknowledged, or lack a route
  double seconds = 0;              // since anything came
};

// Returns nullopt where the socket is not TCP.
std::optional<TcpSilence> silence_of(int socket) noexcept;

// Returns after how many seconds of silence the peer's host counts as dead, by the socket's
// keep-alive; infinite where it has none.
double seconds_to_dead(int socket) noexcept;

// For how long bytes of a socket have waited while none of them was acknowledged.
class TcpStall {
 public:
  using Time = std::chrono::steady_clock::time_point;
  // Returns seconds; 0 where nothing waits. To be asked now and then.
  double seconds(int socket, Time now) noexcept;

 private:
  std::uint64_t acknowledged_ = 0;
  std::optional<Time> since_;
};

}  // namespace gradwire::transport
