#include "gradwire/transport/rdma/rdma_settings.h"

#include <array>
#include <span>

#include "gradwire/transport/settings_reader.h"

namespace gradwire::transport {

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
  reader.number(kTrafficClass.name, 0, 255, settings.traffic_class);
  reader.number("GRADWIRE_IB_SL", 0, 15, settings.service_level);
  reader.number("GRADWIRE_IB_TIMEOUT", 1, 31, settings.timeout);
  return settings;
}

}  // namespace gradwire::transport
