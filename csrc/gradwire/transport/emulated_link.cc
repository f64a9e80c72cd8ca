#include "gradwire/transport/emulated_link.h"

#include <algorithm>

#include "gradwire/base/error.h"
#include "gradwire/transport/quantity.h"

namespace gradwire::transport {
namespace {

using Duration = Deadline::Clock::duration;

// TCP over Ethernet sends 1,448 bytes of payload in a packet, with 66 bytes of headers.
constexpr std::size_t kPayload = 1448, kHeaders = 66;

double parse(std::string_view spec, std::string_view text, const Quantity& quantity) try {
  return parse_quantity(text, quantity);
} catch (const InvalidArgument& error) {
  throw InvalidArgument(
      str_cat("link '", spec, "': ", error.what(),
              "; say 1gbit, 100mbit or 1gbit,100us: a rate (kbit, mbit, gbit: per "
              "second) and a latency one way (us, ms, s)"));
}

Duration duration(double seconds) {
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}

}  // namespace

EmulatedLink::EmulatedLink(std::string_view spec) {
  const std::size_t comma = spec.find(',');
  bits_per_second_ = parse(spec, spec.substr(0, comma), kRate);
  if (comma != spec.npos) latency_ = duration(parse(spec, spec.substr(comma + 1), kLatency));
}

// The packets of the copies leave in turns, so the last packet of each copy leaves at the end.
EmulatedLink::Flight EmulatedLink::send(std::size_t bytes, std::size_t copies) {
  std::lock_guard lock(mutex_);
  const Time begin = std::max(Deadline::Clock::now(), sends_until_);
  sends_until_ = begin + static_cast<Duration::rep>(copies) * time_of(bytes);
  return {begin + latency_, sends_until_ + latency_};
}

EmulatedLink::Time EmulatedLink::receive(const Flight& flight, std::size_t bytes) {
  std::lock_guard lock(mutex_);
  receives_until_ = std::max(flight.first, receives_until_) + time_of(bytes);
  return std::max(flight.last, receives_until_);
}

double EmulatedLink::seconds_of_byte() const {
  return 8 * (1 + static_cast<double>(kHeaders) / static_cast<double>(kPayload)) / bits_per_second_;
}

Duration EmulatedLink::time_of(std::size_t bytes) const {
  const std::size_t packets = (bytes + kPayload - 1) / kPayload;
  const auto bits = static_cast<double>(8 * (bytes + packets * kHeaders));
  return duration(bits / bits_per_second_);
}

}  // namespace gradwire::transport
