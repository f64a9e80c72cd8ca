#include "gradwire/transport/emulated_link.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <optional>
#include <span>
#include <string>

#include "gradwire/base/error.h"

namespace gradwire::transport {
namespace {

using Duration = Deadline::Clock::duration;

struct Unit {
  std::string_view name;
  double value;
};
constexpr std::array kRates = {Unit{"kbit", 1e3}, Unit{"mbit", 1e6}, Unit{"gbit", 1e9}};
constexpr std::array kTimes = {Unit{"us", 1e-6}, Unit{"ms", 1e-3}, Unit{"s", 1}};
constexpr double kLeastRate = 1e5, kMostRate = 1e12;  // bit/s
constexpr double kMostLatency = 1;                    // seconds

// TCP over Ethernet sends 1,448 bytes of payload in a packet, with 66 bytes of headers.
constexpr std::size_t kPayload = 1448, kHeaders = 66;

std::optional<double> parse(std::string_view text, std::span<const Unit> units) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return std::nullopt;
  const std::string_view unit = text.substr(static_cast<std::size_t>(end - text.data()));
  const auto found =
      std::find_if(units.begin(), units.end(), [&](const Unit& each) { return each.name == unit; });
  if (found == units.end()) return std::nullopt;
  return number * found->value;
}

[[noreturn]] void refuse(std::string_view spec, const std::string& why) {
  throw InvalidArgument("link '" + std::string(spec) + "': " + why +
                        "; say 1gbit, 100mbit or 1gbit,100us: a rate (kbit, mbit, gbit: per "
                        "second) and a latency one way (us, ms, s)");
}

double parse_rate(std::string_view spec, std::string_view part) {
  const auto rate = parse(part, kRates);
  if (!rate) refuse(spec, "'" + std::string(part) + "' is no rate");
  if (*rate >= kLeastRate && *rate <= kMostRate) return *rate;
  refuse(spec, "the rate is not within 100kbit and 1000gbit");
}

double parse_latency(std::string_view spec, std::string_view part) {
  const auto latency = parse(part, kTimes);
  if (!latency) refuse(spec, "'" + std::string(part) + "' is no latency");
  if (*latency >= 0 && *latency <= kMostLatency) return *latency;
  refuse(spec, "the latency is not within 0us and 1s");
}

Duration duration(double seconds) {
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}

}  // namespace

EmulatedLink::EmulatedLink(std::string_view spec) {
  const std::size_t comma = spec.find(',');
  bits_per_second_ = parse_rate(spec, spec.substr(0, comma));
  if (comma != spec.npos) latency_ = duration(parse_latency(spec, spec.substr(comma + 1)));
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
