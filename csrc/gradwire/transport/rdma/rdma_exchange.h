// The exchange of two ranks over their authenticated socket to make an RDMA link: first the ports
// at which they can be reached, then, for the pair of ports that the lower rank has chosen, the
// queue pair and the ring of memory that the other end writes into.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "gradwire/transport/rdma/queue_pair.h"
#include "gradwire/transport/socket.h"

namespace gradwire::transport {

// One end of a link.
struct RdmaEnd {
  int port = -1;  // of the rank whose end it is, in the order in which it told of them
  int peer_port = -1;
  QueuePair::Peer queue_pair{};
  // The ring that it receives in: so many slots for a message
  // each, a power of two.
  std::uint64_t ring = 0;
  std::uint32_t key = 0;
  std::uint32_t slots = 0;
};

// Fit into every fresh socket: they do not wait.
void send_ports(int socket, const LinkId& link, std::span<const RdmaPort> ports);
void send_end(int socket, const LinkId& link, const RdmaEnd& end);

// Throw TransportError for what cannot be meant, Timeout where the other end is silent.
std::vector<RdmaAddress> receive_ports(int socket, const LinkId& link, const WaitLimit& wait_limit);
// Without the address, which is the one of its port.
RdmaEnd receive_end(int socket, const LinkId& link, const WaitLimit& wait_limit);

}  // namespace gradwire::transport
