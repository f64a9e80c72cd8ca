#include "gradwire/transport/rdma/rdma_exchange.h"

#include <algorithm>
#include <array>
#include <bit>

#include "gradwire/base/error.h"

namespace gradwire::transport {
namespace {

constexpr std::uint32_t kPortsMagic = 0x31505247;  // "GRP1"
constexpr std::uint32_t kEndMagic = 0x31455247;    // "GRE1"
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

struct EndMessage {
  std::uint32_t magic = kEndMagic;
  std::uint32_t port = 0;
  std::uint32_t peer_port = 0;
  std::uint32_t number = 0;
  std::uint32_t first_packet = 0;
  std::uint32_t slots = 0;
  std::uint32_t key = 0;
  std::uint32_t unused = 0;
  std::uint64_t ring = 0;
};
static_assert(sizeof(EndMessage) == 40);

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
void send_message(const Stream& to, const LinkId& link, const Message& message) {
  send_all(to, std::as_bytes(std::span(&message, 1)), link, Deadline::after(0));
}

template <typename Message>
Message receive_message(const Stream& from, const LinkId& link, const WaitLimit& wait_limit) {
  Message message;
  const std::uint32_t magic = message.magic;
  receive_all(from, std::as_writable_bytes(std::span(&message, 1)), link, wait_limit);
  if (message.magic != magic)
    throw_transport_error(link, "the other end does not speak this version's RDMA protocol");
  return message;
}

}  // namespace

void send_ports(const Stream& to, const LinkId& link, std::span<const RdmaPort> ports) {
  PortsMessage message;
  for (const RdmaPort& port : ports.first(std::min(ports.size(), kMostRdmaPorts)))
    message.addresses[message.count++] = packed(port.address);
  send_message(to, link, message);
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

void send_end(const Stream& to, const LinkId& link, const RdmaEnd& end) {
  EndMessage message;
  message.port = static_cast<std::uint32_t>(end.port);
  message.peer_port = static_cast<std::uint32_t>(end.peer_port);
  message.number = end.queue_pair.number;
  message.first_packet = end.queue_pair.first_packet;
  message.slots = end.slots;
  message.key = end.key;
  message.ring = end.ring;
  send_message(to, link, message);
}

RdmaEnd receive_end(const Stream& from, const LinkId& link, const WaitLimit& wait_limit) {
  const auto message = receive_message<EndMessage>(from, link, wait_limit);
  if (message.port >= kMostRdmaPorts || message.peer_port >= kMostRdmaPorts ||
      message.number >= kNumbers || message.first_packet >= kNumbers ||
      !std::has_single_bit(message.slots) || message.slots > kMostPeerSlots)
    throw_transport_error(link, "the other end described an impossible RDMA connection");
  return {static_cast<int>(message.port),
          static_cast<int>(message.peer_port),
          {message.number, message.first_packet},
          message.ring,
          message.key,
          message.slots};
}

}  // namespace gradwire::transport
