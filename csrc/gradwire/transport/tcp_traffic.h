// TcpTraffic: what all tcp links of a process share: the rate that they keep to together, the class
// of their packets and their congestion control. A rank is mostly a process.
#pragma once

#include <chrono>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "gradwire/transport/kind.h"

namespace gradwire::transport {

// A rate by the time of day: "200mbit,08:00-18:00=50mbit". A time's rate goes before the one
// without a time, which holds at all others; without it these have no limit.
class RateOfDay {
 public:
  static constexpr double kNoLimit = 0;
  static constexpr int kMinutes = 24 * 60;

  RateOfDay() = default;
  // Throws InvalidArgument.
  explicit RateOfDay(std::string_view spec);

  bool limits() const noexcept { return usual_ != kNoLimit || !windows_.empty(); }
  // Returns the bits per second at a minute of the day, or kNoLimit.
  double at_minute(int minute) const noexcept;
  // The same, now, in local time.
  double now() const noexcept;

 private:
  struct Window {
    int from, until;  // minutes; around midnight where it ends before it begins
    double rate;
  };
  static Window parse_window(std::string_view text);

  std::vector<Window> windows_;
  double usual_ = kNoLimit;
};

// Any thread may use it: all communicators of a rank share one.
class TcpTraffic final : public TransportContext {
 public:
  // Throws InvalidArgument.
  explicit TcpTraffic(const Settings& given);

  // Gives a socket its options, and a part of the rate until remove(). Throws InvalidArgument where
  // the kernel refuses them.
  void add(int socket);
  void remove(int socket) noexcept;
  // Must be called before bytes are sent: divides the rate among the sockets that have some to
  // send.
  void share(int socket) {
    if (rate_.limits()) divide(socket);
  }
  std::vector<std::string> describe() const override;

 private:
  using Clock = std::chrono::steady_clock;
  struct Share {
    bool sends = false;
    double rate = RateOfDay::kNoLimit;
  };

  void divide(int socket);
  void set_options(int socket) const;

  RateOfDay rate_;
  std::string congestion_;  // "": the kernel's default
  int traffic_class_ = -1;  // -1: not set
  std::mutex mutex_;
  std::map<int, Share> shares_;  // by socket
  Clock::time_point divided_;    // last
};

}  // namespace gradwire::transport
