// Reading the settings of a kind of link, and the variable that several kinds have.
#pragma once

#include <charconv>
#include <span>
#include <string>
#include <string_view>

#include "gradwire/base/error.h"
#include "gradwire/transport/kind.h"

namespace gradwire::transport {

inline constexpr EnvironmentVariable kTrafficClass{
    "GRADWIRE_TRAFFIC_CLASS",
    "traffic class of TCP and RDMA packets, 0 to 255: DSCP in its upper six bits", "0"};

// Reads the given settings one by one.
class SettingsReader {
 public:
  explicit SettingsReader(const Settings& given) : given_(given) {}

  std::string text(std::string_view name) const {
    const auto found = given_.find(name);
    return found == given_.end() ? "" : found->second;
  }

  void number(std::string_view name, int least, int most, int& value) const {
    const std::string given = text(name);
    if (given.empty()) return;
    const auto [end, error] = std::from_chars(given.data(), given.data() + given.size(), value);
    const bool whole = error == std::errc() && end == given.data() + given.size();
    if (!whole || value < least || value > most)
      refuse(name, str_cat(" is out of range: use ", least, " to ", most));
  }

  std::string choice(std::string_view name, std::span<const std::string_view> among) const {
    const std::string given = text(name);
    std::string known;
    for (std::string_view each : among) {
      if (given.empty() || given == each) return given;
      known += (known.empty() ? "" : ", ") + std::string(each);
    }
    refuse(name, ": use " + known);
  }

 private:
  [[noreturn]] void refuse(std::string_view name, const std::string& why) const {
    throw InvalidArgument(str_cat(name, "='", text(name), "'", why));
  }

  const Settings& given_;
};

}  // namespace gradwire::transport
