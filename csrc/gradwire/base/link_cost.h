// LinkCost: what a message costs on a link, for the cost model (schedule/cost.h).
#pragma once

namespace gradwire {

// Costs in seconds. Those per byte count wire bytes.
struct LinkCost {
  double alpha = 0;    // processor time per message, at each end
  double latency = 0;  // from staged to seen; occupies no processor
  double beta = 0;     // NIC time per byte, at each end
  double copy = 0;     // processor time per byte, at each end: what the kernel moves
  double mixed = 0;    // more NIC time per byte of a message after one of another sender
  double burst = 0;    // bytes that pass a NIC at once that was idle, as a token bucket lets them
};

}  // namespace gradwire
