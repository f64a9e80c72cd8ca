#include "gradwire/transport/rdma/rdma_exchange.h"

#include <algorithm>
#include <array>
#include <bit>

#include "gradwire/base/error.h"

namespace gradwire::transport {
namespace {

constexpr std::uint32_t kPortsMagic = 0x31505247;  // "GRP1"
constexpr std::uint32_t kMostPeerSlots = 1 << 16;
constexpr std::uint32_t kNumbers = 1 << 24;  // limit of queue pair and packet numbers

struct PackedAddress {
  ibv::Gid gid{};
  std::array<char, 64> network{};
  std::uint16_t lid = 0;
  std::uint8_t link_layer = 0;
  std::uint8_t mtu = 0;
  std::uint32_t unused = 0;
};
struct PortsMessage {
  std::uint32_t magic = kPortsMagic;
  std::uint32_t count = 0;
  std::array<PackedAddress, kMostRdmaPorts> addresses{};
};
static_assert(sizeof(PortsMessage) == 8 + kMostRdmaPorts * 88);

PackedAddress packed(const RdmaAddress& address) {
  PackedAddress message;
  message.gid = address.gid;
  address.network.copy(message.network.data(), message.network.size() - 1);
  message.lid = address.lid;
  message.link_layer = address.link_layer;
  message.mtu = address.mtu;
  return message;
}

RdmaAddress unpacked(const PackedAddress& message, const LinkId& link) {
  const bool layer_fits =
      message.link_layer == ibv::kLinkInfiniBand || message.link_layer == ibv::kLinkEthernet;
  const bool mtu_fits = message.mtu >= ibv::kMtu256 && message.mtu <= ibv::kMtu4096;
  const auto end = std::find(message.network.begin(), message.network.end(), '\0');
  if (!layer_fits || !mtu_fits || end == message.network.end())
    throw_transport_error(link, "the other end told of an impossible RDMA port");
  return {message.gid, message.lid, message.link_layer, message.mtu,
          std::string(message.network.begin(), end)};
}

template <typename Message>
Message receive_message(const Stream& from, const LinkId& link, const WaitLimit& wait_limit) {
  const auto message = receive_value<Message>(from, link, wait_limit);
  if (message.magic != Message{}.magic)
    throw_transport_error(link, "the other end does not speak this version's RDMA protocol");
  return message;
}

}  // namespace

void send_ports(const Stream& to, const LinkId& link, std::span<const RdmaPort> ports) {
  PortsMessage message;
  for (const RdmaPort& port : ports.first(std::min(ports.size(), kMostRdmaPorts)))
    message.addresses[message.count++] = packed(port.address);
  send_value(to, message, link);
}

std::vector<RdmaAddress> receive_ports(const Stream& from, const LinkId& link,
                                       const WaitLimit& wait_limit) {
  const auto message = receive_message<PortsMessage>(from, link, wait_limit);
  if (message.count > kMostRdmaPorts)
    throw_transport_error(link, "the other end told of an impossible number of RDMA ports");
  std::vector<RdmaAddress> addresses;
  for (std::size_t i = 0; i < message.count; ++i)
    addresses.push_back(unpacked(message.addresses[i], link));
  return addresses;
}

RdmaEnd receive_end(const Stream& from, const LinkId& link, const WaitLimit& wait_limit) {
  const auto end = receive_message<RdmaEnd>(from, link, wait_limit);
  if (end.port >= kMostRdmaPorts || end.peer_port >= kMostRdmaPorts || end.number >= kNumbers ||
      end.first_packet >= kNumbers || !std::has_single_bit(end.slots) || end.slots > kMostPeerSlots)
    throw_transport_error(link, "the other end described an impossible RDMA connection");
  return end;
}

}  // namespace gradwire::transport
