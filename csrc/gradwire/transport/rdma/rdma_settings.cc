#include "gradwire/transport/rdma/rdma_settings.h"

#include <array>
#include <charconv>
#include <span>

#include "gradwire/base/error.h"

namespace gradwire::transport {
namespace {

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

}  // namespace

RdmaSettings read_rdma_settings(const Settings& given) {
  constexpr std::array<std::string_view, 2> kLayers = {"ethernet", "infiniband"};
  constexpr std::array<std::string_view, 5> kMtus = {"256", "512", "1024", "2048", "4096"};
  const SettingsReader reader(given);
  RdmaSettings settings;
  settings.hca = reader.text("GRADWIRE_IB_HCA");
  settings.link_layer = reader.choice("GRADWIRE_IB_LINK_LAYER", kLayers);
  reader.number("GRADWIRE_IB_GID_INDEX", 0, 255, settings.gid_index);
  const std::string mtu = reader.choice("GRADWIRE_IB_MTU", kMtus);
  settings.mtu = mtu.empty() ? 0 : std::stoi(mtu);
  reader.number("GRADWIRE_IB_TC", 0, 255, settings.traffic_class);
  reader.number("GRADWIRE_IB_SL", 0, 15, settings.service_level);
  reader.number("GRADWIRE_IB_TIMEOUT", 1, 31, settings.timeout);
  return settings;
}

}  // namespace gradwire::transport
