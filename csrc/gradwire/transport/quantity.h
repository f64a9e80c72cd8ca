// Rates and latencies as users write them, in the units of Linux's tc.
#pragma once

#include <array>
#include <string_view>
#include <utility>

namespace gradwire::transport {

// A number with one of these units, and its limits.
struct Quantity {
  std::string_view name;
  std::array<std::pair<std::string_view, double>, 3> units;
  double least, most;
  std::string_view range;
};
inline constexpr Quantity kRate{
    "rate", {{{"kbit", 1e3}, {"mbit", 1e6}, {"gbit", 1e9}}}, 1e5, 1e12, "100kbit and 1000gbit"};
inline constexpr Quantity kLatency{
    "latency", {{{"us", 1e-6}, {"ms", 1e-3}, {"s", 1}}}, 0, 1, "0us and 1s"};

// Returns bits per second, or seconds. Throws InvalidArgument, which says what is wrong.
double parse_quantity(std::string_view text, const Quantity& quantity);

}  // namespace gradwire::transport
