// How RDMA ports are named and paired, without any device.
#include "gradwire/transport/rdma/rdma_addresses.h"

#include <gtest/gtest.h>

#include "gradwire/base/types.h"
#include "gradwire/transport/rdma/rdma_devices.h"

namespace gradwire::transport {
namespace transport_rdma_addresses_test {

ibv::Gid ipv4(std::uint8_t a, std::uint8_t b, std::uint8_t c, std::uint8_t d) {
  return {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d};
}
constexpr ibv::Gid kLinkLocal = {0xfe, 0x80, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0xff, 0xfe, 0, 0, 1};
constexpr ibv::Gid kIpv6 = {0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};

TEST(RdmaAddresses, AGidIsAnAddressAsText) {
  EXPECT_EQ(gid_text(ipv4(198, 18, 0, 1)), "198.18.0.1");
  EXPECT_EQ(gid_text(kIpv6), "2001:db8::1");
  EXPECT_EQ(gid_text(kLinkLocal), "fe80::200:ff:fe00:1");
  EXPECT_TRUE(is_ipv4(ipv4(1, 2, 3, 4)));
  EXPECT_FALSE(is_ipv4(kIpv6));
  EXPECT_TRUE(is_link_local(kLinkLocal));
  EXPECT_FALSE(is_link_local(kIpv6));
}

TEST(RdmaAddresses, ANetworkIsToldOfThisHostsAddressesOnly) {
  EXPECT_EQ(ethernet_network(ipv4(127, 0, 0, 1)), "ethernet 127.0.0.0/8");
  EXPECT_EQ(ethernet_network(ipv4(203, 0, 113, 77)), "");  // for documentation: nobody has it
  EXPECT_EQ(ethernet_network(kLinkLocal), "");
  EXPECT_EQ(infiniband_network(kLinkLocal), "infiniband fe80000000000000");
}

struct Match {
  const char* pattern;
  std::vector<std::string> named;  // of all ports below
};

TEST(RdmaAddresses, PatternsAreThoseOfNccl) {
  const std::vector<std::pair<std::string, int>> ports = {
      {"mlx5_0", 1}, {"mlx5_1", 1}, {"mlx5_1", 2}, {"mlx5_10", 1}, {"rxe0", 1}};
  const std::vector<std::string> all = {"mlx5_0:1", "mlx5_1:1", "mlx5_1:2", "mlx5_10:1", "rxe0:1"};
  const std::vector<Match> matches = {
      {"", all},
      {"mlx5", {"mlx5_0:1", "mlx5_1:1", "mlx5_1:2", "mlx5_10:1"}},
      {"mlx5_1", {"mlx5_1:1", "mlx5_1:2", "mlx5_10:1"}},
      {"=mlx5_1", {"mlx5_1:1", "mlx5_1:2"}},
      {"=mlx5", {}},
      {"mlx5_1:2", {"mlx5_1:2"}},
      {"=mlx5_1:1", {"mlx5_1:1"}},
      {"=mlx5_1:3", {}},
      {"mlx5_0,rxe", {"mlx5_0:1", "rxe0:1"}},
      {"=mlx5_0:1,mlx5_1:2", {"mlx5_0:1", "mlx5_1:2"}},
      {"^mlx5", {"rxe0:1"}},
      {"^mlx5_1:2", {"mlx5_0:1", "mlx5_1:1", "mlx5_10:1", "rxe0:1"}},
      {"^=mlx5_1", {"mlx5_0:1", "mlx5_10:1", "rxe0:1"}},
      {"^=mlx5_0,mlx5_10:1", {"mlx5_1:1", "mlx5_1:2", "rxe0:1"}},
      {"^", all},
      {"=", all},
      {"mlx5_0,,rxe0", {"mlx5_0:1", "rxe0:1"}},  // an empty word names nothing
      {"mlx5_0, rxe0", {"mlx5_0:1"}},            // nor does one with a blank, as with NCCL
      {":1", {}},
      {"mlx5_0:", {}},
      {"mlx5_0:x", {}},
      {"mlx6", {}},
  };
  for (const Match& match : matches) {
    std::vector<std::string> named;
    for (const auto& [device, port] : ports)
      if (hca_matches(match.pattern, device, port))
        named.push_back(device + ":" + std::to_string(port));
    EXPECT_EQ(named, match.named) << "'" << match.pattern << "'";
  }
}

std::vector<RdmaAddress> on(const std::vector<std::string>& networks,
                            std::uint8_t layer = ibv::kLinkEthernet) {
  std::vector<RdmaAddress> addresses;
  for (const std::string& network : networks)
    addresses.push_back({.link_layer = layer, .network = network});
  return addresses;
}

using Pair = std::pair<int, int>;

TEST(RdmaPairs, PortsOfOneNetworkReachEachOther) {
  EXPECT_EQ(pair_ports(on({"a", "b"}), on({"c", "b"}), 0, 1), Pair(1, 1));
  EXPECT_EQ(pair_ports(on({"a", "b"}), on({"b"}), 2, 3), Pair(1, 0));
  EXPECT_EQ(pair_ports(on({"", "b"}), on({"", "b"}), 0, 1), Pair(1, 1));  // the rather
}

TEST(RdmaPairs, NetworksOfOneNameAndAnotherLinkLayerAreTwo) {
  EXPECT_EQ(pair_ports(on({"a"}), on({"a"}, ibv::kLinkInfiniBand), 0, 1), Pair(-1, -1));
}

TEST(RdmaPairs, PortsOfNoKnownNetworkArePairedByPosition) {
  EXPECT_EQ(pair_ports(on({""}), on({""}), 0, 1), Pair(0, 0));
  EXPECT_EQ(pair_ports(on({"", ""}), on({"", "", ""}), 1, 2), Pair(1, 1));
  EXPECT_EQ(pair_ports(on({"a", "b"}), on({"c", "d"}), 0, 1), Pair(0, 0));
  auto mixed = on({"", ""});
  mixed[0].link_layer = ibv::kLinkInfiniBand;
  EXPECT_EQ(pair_ports(mixed, on({"", ""}), 0, 1), Pair(1, 1));
}

TEST(RdmaPairs, WithoutAPortThereIsNoPair) {
  EXPECT_EQ(pair_ports({}, on({"a"}), 0, 1), Pair(-1, -1));
  EXPECT_EQ(pair_ports(on({"a"}), {}, 0, 1), Pair(-1, -1));
}

// Which of its ports a rank of a ring of so many uses to its two neighbours.
std::vector<std::pair<int, int>> ring_ports(int ranks, const std::vector<RdmaAddress>& ports) {
  std::vector<std::pair<int, int>> used(static_cast<std::size_t>(ranks));
  for (Rank rank = 0; rank < ranks; ++rank) {
    const Rank next = (rank + 1) % ranks;
    const bool up = rank < next;
    const auto [lower, higher] =
        pair_ports(ports, ports, std::min(rank, next), std::max(rank, next));
    used[static_cast<std::size_t>(rank)].second = up ? lower : higher;
    used[static_cast<std::size_t>(next)].first = up ? higher : lower;
  }
  return used;
}

TEST(RdmaPairs, NeighboursInARingUseTwoPortsInTurns) {
  for (const auto& ports : {on({"a", "b"}), on({"a", "a"}), on({"", ""})})
    for (const auto& [to_last, to_next] : ring_ports(4, ports)) EXPECT_NE(to_last, to_next);
}

TEST(RdmaPairs, EveryPortOfTheEndWithMoreIsUsed) {
  std::vector<int> uses(4);
  for (Rank leaf = 1; leaf < 9; ++leaf)  // of a star whose centre has four
    ++uses[static_cast<std::size_t>(
        pair_ports(on({"a", "a", "a", "a"}), on({"a"}), 0, leaf).first)];
  EXPECT_EQ(uses, (std::vector<int>{2, 2, 2, 2}));
}

}  // namespace transport_rdma_addresses_test
}  // namespace gradwire::transport
