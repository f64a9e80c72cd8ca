// The exchange of two ranks over their authenticated socket to make an RDMA link. First each sends
// the ports at which it can be reached; then, for the pair of ports that the lower rank has chosen,
// each sends the queue pair and the ring of memory that the other end writes into.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "gradwire/transport/rdma/queue_pair.h"
#include "gradwire/transport/socket.h"

namespace gradwire::transport {

// One end of a link.
struct RdmaEnd {
  int port = -1;  // index among the ports that this end's rank sent
  int peer_port = -1;
  QueuePair::Peer queue_pair{};
  // The ring that this end receives into. It has `slots` slots, a power of two, each for one
  // message.
  std::uint64_t ring = 0;
  std::uint32_t key = 0;
  std::uint32_t slots = 0;
};

// Do not block: what they send fits into the buffer of every fresh socket.
void send_ports(const Stream& to, const LinkId& link, std::span<const RdmaPort> ports);
void send_end(const Stream& to, const LinkId& link, const RdmaEnd& end);

// Throw TransportError for impossible values, Timeout where the other end is silent.
std::vector<RdmaAddress> receive_ports(const Stream& from, const LinkId& link,
                                       const WaitLimit& wait_limit);
// The result has no address, which is that of its port.
RdmaEnd receive_end(const Stream& from, const LinkId& link, const WaitLimit& wait_limit);

}  // namespace gradwire::transport
