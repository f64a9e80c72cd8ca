// What two ranks exchange over their authenticated socket to make an RDMA link. First each sends
// its ports. Then the lower rank chooses a pair of ports, and each end sends its queue pair, and
// the ring of memory that the other end is to write into.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "gradwire/transport/rdma/queue_pair.h"
#include "gradwire/transport/socket.h"

namespace gradwire::transport {

// One end of a link, as it is sent to the other end.
struct RdmaEnd {
  std::uint32_t magic = 0x31455247;  // "GRE1"
  std::uint32_t port = 0;            // index among the ports that this end's rank sent
  std::uint32_t peer_port = 0;
  std::uint32_t number = 0;        // of the queue pair
  std::uint32_t first_packet = 0;  // its first packet sequence number, 24 bits
  // The ring that this end receives into. It has `slots` slots, a power of two, each for one
  // message.
  std::uint32_t slots = 0;
  std::uint32_t key = 0;
  std::uint32_t unused = 0;
  std::uint64_t ring = 0;
};
static_assert(sizeof(RdmaEnd) == 40);

// Does not block: what it sends fits into the buffer of every fresh socket.
void send_ports(const Stream& to, const LinkId& link, std::span<const RdmaPort> ports);

// Throw TransportError for impossible values, Timeout where the other end is silent.
std::vector<RdmaAddress> receive_ports(const Stream& from, const LinkId& link,
                                       const WaitLimit& wait_limit);
RdmaEnd receive_end(const Stream& from, const LinkId& link, const WaitLimit& wait_limit);

}  // namespace gradwire::transport
