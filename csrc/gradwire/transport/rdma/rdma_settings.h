// The user's settings for RDMA: the environment variables GRADWIRE_IB_*, and the traffic class.
#pragma once

#include <array>
#include <string>

#include "gradwire/transport/rdma/verbs.h"
#include "gradwire/transport/settings_reader.h"

namespace gradwire::transport {

struct RdmaSettings {
  std::string hca{};         // NCCL's syntax: prefix[:port][,...], =exact, ^excluded; "" for all
  std::string link_layer{};  // "ethernet" (RoCE) or "infiniband" only; "" for both
  int gid_index = -1;     // in the port's table; -1: RoCE v2 with an IPv4 address if there is one
  int mtu = 0;            // bytes, 256 to 4096; 0: the port's own
  int traffic_class = 0;  // 0 to 255, of RoCE v2's IP header (DSCP in its upper six bits)
  int service_level = 0;  // 0 to 15
  int timeout = 18;       // 1 to 31: 4.096 us * 2^timeout until a packet is sent again
  std::string library = Verbs::kLibrary;
};

inline constexpr std::array kRdmaVariables = {
    EnvironmentVariable{"GRADWIRE_IB_HCA",
                        "RDMA devices, as in NCCL: prefix[:port][,...], =exact, ^excluded",
                        "those that reach the peer"},
    EnvironmentVariable{"GRADWIRE_IB_LINK_LAYER",
                        "use RDMA ports of one kind: ethernet or infiniband", "both"},
    EnvironmentVariable{"GRADWIRE_IB_GID_INDEX", "index of the RDMA port's address",
                        "RoCE v2 with an IPv4 address"},
    EnvironmentVariable{"GRADWIRE_IB_MTU", "bytes of RDMA packets, 256 to 4096", "the port's"},
    kTrafficClass,
    EnvironmentVariable{"GRADWIRE_IB_SL", "service level of RDMA packets, 0 to 15", "0"},
    EnvironmentVariable{"GRADWIRE_IB_TIMEOUT",
                        "a lost RDMA packet is sent again after 4.096 us x 2^this, 6 times", "18"},
};

// Reads the settings. Throws InvalidArgument, which names the variable, for an impossible value.
RdmaSettings read_rdma_settings(const Settings& given);

}  // namespace gradwire::transport
