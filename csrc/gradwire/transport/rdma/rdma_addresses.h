// RDMA addresses (GIDs) as text, the networks that they are on, and NCCL's pattern for device
// names.
#pragma once

#include <string>
#include <string_view>

#include "gradwire/transport/rdma/verbs_abi.h"

namespace gradwire::transport {

// Returns whether a GID holds an IPv4 address, ::ffff:a.b.c.d.
bool is_ipv4(const ibv::Gid& gid);
bool is_link_local(const ibv::Gid& gid);

// Returns the text of an address: "198.18.0.1", "2001:db8::1".
std::string gid_text(const ibv::Gid& gid);

// Returns "ethernet 198.18.0.0/24" for an address that one of this host's interfaces has; "" where
// none has it, or where it is link-local and so does not identify a network.
std::string ethernet_network(const ibv::Gid& gid);
// Returns "infiniband fe80000000000000": the GID's subnet prefix.
std::string infiniband_network(const ibv::Gid& gid);

// Returns whether NCCL's pattern names this port: "mlx5_1:1,mlx5_2", "=mlx5_0:1", "^mlx5_3",
// "^=...".
bool hca_matches(std::string_view pattern, std::string_view device, int port);

}  // namespace gradwire::transport
