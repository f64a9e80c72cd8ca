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

// A number with one of these units, and its limits.
struct Quantity {
  std::string_view name;
  std::array<std::pair<std::string_view, double>, 3> units;
  double least, most;
  std::string_view range;
};
constexpr Quantity kRate{
    "rate", {{{"kbit", 1e3}, {"mbit", 1e6}, {"gbit", 1e9}}}, 1e5, 1e12, "100kbit and 1000gbit"};
constexpr Quantity kLatency{
    "latency", {{{"us", 1e-6}, {"ms", 1e-3}, {"s", 1}}}, 0, 1, "0us and 1s"};

// TCP over Ethernet sends 1,448 bytes of payload in a packet, with 66 bytes of headers.
constexpr std::size_t kPayload = 1448, kHeaders = 66;

double parse(std::string_view spec, std::string_view text, const Quantity& quantity) {
  const auto refuse = [&](const std::string& why) {
    throw InvalidArgument(
        str_cat("link '", spec, "': ", why,
                "; say 1gbit, 100mbit or 1gbit,100us: a rate (kbit, mbit, gbit: per "
                "second) and a latency one way (us, ms, s)"));
  };
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const std::string_view unit(end, text.data() + text.size());
  const auto found = std::ranges::find(quantity.units, unit, [](auto& each) { return each.first; });
  const std::string name(quantity.name);
  if (error != std::errc() || found == quantity.units.end())
    refuse(str_cat("'", text, "' is no ", name));
  number *= found->second;
  if (!(number >= quantity.least && number <= quantity.most))
    refuse(str_cat("the ", name, " is not within ", quantity.range));
  return number;
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
