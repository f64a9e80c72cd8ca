// What the other end of an RDMA link says of its ports, and then of its end of the link.
//   input: the stream
#include "fuzz.h"
#include "gradwire/transport/rdma/rdma_exchange.h"

namespace gradwire::fuzz {
namespace {

constexpr transport::LinkId kLink{"rdma", 0, 1};
using Addresses = std::vector<transport::RdmaAddress>;

Addresses own_ports() {
  using namespace transport;
  return {{.link_layer = ibv::kLinkEthernet, .network = "ethernet 10.0.0.0/24"},
          {.link_layer = ibv::kLinkEthernet, .network = ""},
          {.link_layer = ibv::kLinkInfiniBand, .network = "infiniband fe80000000000000"}};
}

void check_ports(const Addresses& ports) {
  require(ports.size() <= 16);
  for (const transport::RdmaAddress& port : ports) {
    require(port.mtu >= transport::ibv::kMtu256 && port.mtu <= transport::ibv::kMtu4096);
    require(port.network.size() < 64);
  }
}

// Two ports of theirs and ours, or none.
void check_pair(const Addresses& lower, const Addresses& higher) {
  for (Rank rank = 1; rank < 20; ++rank) {
    const auto [i, j] = transport::pair_ports(lower, higher, 0, rank);
    if (i < 0) return require(j < 0);
    require(lower.at(static_cast<std::size_t>(i)).link_layer ==
            higher.at(static_cast<std::size_t>(j)).link_layer);
  }
}

void check_end(const transport::RdmaEnd& end) {
  require(end.port < 16 && end.peer_port < 16);
  require(end.slots > 0 && (end.slots & (end.slots - 1)) == 0);
  require(end.number >> 24 == 0 && end.first_packet >> 24 == 0);
}

}  // namespace
}  // namespace gradwire::fuzz

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace gradwire::fuzz;
  const NoDescriptorLeft none;
  Input input(data, size);
  expect_typed([&] {
    const auto [own, peer] = socket_pair();
    say(peer, input.rest());
    const gradwire::WaitLimit wait_limit(gradwire::Deadline::after(0));
    const Addresses theirs = gradwire::transport::receive_ports(own.get(), kLink, wait_limit);
    check_ports(theirs);
    check_pair(own_ports(), theirs);
    check_pair(theirs, own_ports());
    check_end(gradwire::transport::receive_end(own.get(), kLink, wait_limit));
  });
  return 0;
}
