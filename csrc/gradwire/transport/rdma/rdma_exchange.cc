#include "gradwire/transport/rdma/rdma_exchange.h"

#include <algorithm>
#include <array>
#include <bit>

#include "gradwire/base/error.h"

namespace gradwire::transport {
namespace {

constexpr std::uint32_t kPortsMagic = 0x31505247;  // "GRP1"
constexpr std::uint32_t kEndMagic = 0x31455247;    // "GRE1"
constexpr std::uint32_t kMostSlots = 1 << 16;
constexpr std::uint32_t kNumbers = 1 << 24;  // of queue pairs and of packets

struct AddressCard {
  ibv::Gid gid{};
  std::array<char, 64> network{};
  std::uint16_t lid = 0;
  std::uint8_t link_layer = 0;
  std::uint8_t mtu = 0;
  std::uint32_t unused = 0;
};
struct PortsCard {
  std::uint32_t magic = kPortsMagic;
  std::uint32_t count = 0;
  std::array<AddressCard, kMostRdmaPorts> addresses{};
};
static_assert(sizeof(PortsCard) == 8 + kMostRdmaPorts * 88);

struct EndCard {
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
static_assert(sizeof(EndCard) == 40);

AddressCard packed(const RdmaAddress& address) {
  AddressCard card;
  card.gid = address.gid;
  address.network.copy(card.network.data(), card.network.size() - 1);
  card.lid = address.lid;
  card.link_layer = address.link_layer;
  card.mtu = address.mtu;
  return card;
}

RdmaAddress unpacked(const AddressCard& card, const LinkId& link) {
  const bool layer_fits =
      card.link_layer == ibv::kLinkInfiniBand || card.link_layer == ibv::kLinkEthernet;
  const bool mtu_fits = card.mtu >= ibv::kMtu256 && card.mtu <= ibv::kMtu4096;
  const auto end = std::find(card.network.begin(), card.network.end(), '\0');
  if (!layer_fits || !mtu_fits || end == card.network.end())
    throw_transport_error(link, "the other end told of an impossible RDMA port");
  return {card.gid, card.lid, card.link_layer, card.mtu, std::string(card.network.begin(), end)};
}

template <typename Card>
void send_card(int socket, const LinkId& link, const Card& card) {
  send_all(socket, std::as_bytes(std::span(&card, 1)), link, Deadline::after(0));
}

template <typename Card>
Card receive_card(int socket, const LinkId& link, const WaitLimit& wait_limit) {
  Card card;
  const std::uint32_t magic = card.magic;
  receive_all(socket, std::as_writable_bytes(std::span(&card, 1)), link, wait_limit);
  if (card.magic != magic)
    throw_transport_error(link, "the other end does not speak this version's RDMA protocol");
  return card;
}

}  // namespace

void send_ports(int socket, const LinkId& link, std::span<const RdmaPort> ports) {
  PortsCard card;
  for (const RdmaPort& port : ports.first(std::min(ports.size(), kMostRdmaPorts)))
    card.addresses[card.count++] = packed(port.address);
  send_card(socket, link, card);
}

std::vector<RdmaAddress> receive_ports(int socket, const LinkId& link,
                                       const WaitLimit& wait_limit) {
  const auto card = receive_card<PortsCard>(socket, link, wait_limit);
  if (card.count > kMostRdmaPorts)
    throw_transport_error(link, "the other end told of an impossible number of RDMA ports");
  std::vector<RdmaAddress> addresses;
  for (std::size_t i = 0; i < card.count; ++i)
    addresses.push_back(unpacked(card.addresses[i], link));
  return addresses;
}

void send_end(int socket, const LinkId& link, const RdmaEnd& end) {
  EndCard card;
  card.port = static_cast<std::uint32_t>(end.port);
  card.peer_port = static_cast<std::uint32_t>(end.peer_port);
  card.number = end.queue_pair.number;
  card.first_packet = end.queue_pair.first_packet;
  card.slots = end.slots;
  card.key = end.key;
  card.ring = end.ring;
  send_card(socket, link, card);
}

RdmaEnd receive_end(int socket, const LinkId& link, const WaitLimit& wait_limit) {
  const auto card = receive_card<EndCard>(socket, link, wait_limit);
  if (card.port >= kMostRdmaPorts || card.peer_port >= kMostRdmaPorts || card.number >= kNumbers ||
      card.first_packet >= kNumbers || !std::has_single_bit(card.slots) || card.slots > kMostSlots)
    throw_transport_error(link, "the other end described an impossible RDMA connection");
  return {static_cast<int>(card.port),
          static_cast<int>(card.peer_port),
          {card.number, card.first_packet},
          card.ring,
          card.key,
          card.slots};
}

}  // namespace gradwire::transport
