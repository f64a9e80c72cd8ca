// A Transport moves messages (bytes) between this rank and the peers it has links to, in order per
// pair and direction. The caller writes a message into the link's own staging memory, and reads one
// where the link received it: nothing is copied in between.
//
// One thread at a time uses a Transport: the communicator's driver. Only complete() and adopt()
// block; the driver sleeps on the doorbell() of all its transports at once. Every call that finds a
// peer gone throws TransportError with that peer; messages that had arrived before can still be
// peeked first.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gradwire/base/copy.h"
#include "gradwire/base/types.h"
#include "gradwire/base/wait_limit.h"
#include "gradwire/base/wire.h"
#include "gradwire/transport/connection.h"
#include "gradwire/transport/kind.h"

namespace gradwire::transport {

inline constexpr std::size_t kLine = 64;  // bytes of a cache line

// Wakes the rank at the other end of a link, through a socket that both ends poll anyway.
class Bells {
 public:
  virtual void ring(Rank peer) noexcept = 0;

 protected:
  ~Bells() = default;
};

struct LinkOptions {
  Rank rank = 0;
  int size = 1;
  std::size_t max_message = kUsualFrame;  // bytes of the largest message, the same on all ranks
  // How many messages may be staged at a time, for all peers together, and unread by one peer: so a
  // slow reader holds up no other. Small messages may need no staging.
  int messages = 16;
  int messages_per_peer = 16;
  std::shared_ptr<TransportContext> context{};  // this process's, from open_transport()
  // Null on all ranks or none; must outlive the transport. With it, links over shared memory keep
  // no socket, and learn of a peer's end by end(). Without it, each link keeps its socket.
  Bells* bells = nullptr;
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual std::string_view name() const noexcept = 0;
  virtual std::size_t max_message() const noexcept = 0;

  // Takes over a connected, authenticated socket to `peer`, and sends what the other end waits for
  // in complete(). Does not block. Where the connection has keys, all traffic over it is sealed.
  virtual void offer(Connection connection, Rank peer) = 0;
  // Waits for the other ends' offers, within `wait_limit`, and makes all links that were offered.
  // Blocks.
  virtual void complete(const WaitLimit& wait_limit) = 0;
  // Calls offer() and complete(). Not for two ends in one thread: each waits for the other's offer.
  void adopt(Connection connection, Rank peer, double timeout_seconds) {
    offer(std::move(connection), peer);
    complete(Deadline::after(timeout_seconds));
  }
  // Must be called after the last offer(): frees what only offers need.
  virtual void close_offers() noexcept {}
  virtual std::vector<Rank> peers() const = 0;
  // Reports that a peer has ended, which a link without a socket cannot see (LinkOptions::bells).
  virtual void end(Rank /*peer*/) noexcept {}

  // Limits the unread messages of each peer from now on, below LinkOptions::messages_per_peer.
  // Ignored by links that cannot tell what a peer has read.
  virtual void limit_unread(int /*messages*/) noexcept {}

  // Returns staging memory, 64-byte aligned, for one message to each of `peers` (not empty, all
  // linked, no duplicates). data() is null when there is no room now: try again after the doorbell
  // rings. At most one reservation is open: another reserve() replaces it.
  virtual Bytes reserve(std::span<const Rank> peers, std::size_t bytes) = 0;
  // Returns the fastest way to copy large data into the open reservation.
  virtual Copy copy() const noexcept { return copy_cached; }
  // Sends the first `bytes` of the open reservation.
  virtual void commit(std::size_t bytes) = 0;
  // Sends what commit() could not send at once; returns true when nothing of it is left. Only links
  // that buffer (tcp, rdma) have anything to do.
  virtual bool flush() { return true; }
  // Returns whether flush() has nothing left to send to this peer.
  virtual bool is_flushed(Rank /*peer*/) const { return true; }

  // To be called now and then before this end is destroyed, until it returns true: what was sent by
  // a way that fails is then at the peers' hosts by another one.
  virtual bool deliver() { return true; }

  // Returns the oldest message from `peer` that was not released; nullopt when none has arrived
  // whole. It stays in place, 8-byte aligned, until release(peer). Empty messages count.
  virtual std::optional<ConstBytes> peek(Rank peer) = 0;
  virtual void release(Rank peer) = 0;

  // Returns a descriptor that becomes readable when something may have changed since arm(). To
  // sleep: arm(), look once more, poll() the descriptor, disarm(), which clears it. -1 where only
  // LinkOptions::bells wake.
  virtual int doorbell() const noexcept = 0;
  virtual void arm() = 0;
  virtual void disarm() = 0;
};

// Returns all kinds of link, best first. inproc is for ranks that are threads of one process (spawn
// with threads), and never chosen by default; emulated is chosen where GRADWIRE_LINK asks for it,
// and then excludes all others.
std::span<const TransportKind* const> transport_kinds();
// Returns the kind of that name; throws InvalidArgument for an unknown one.
const TransportKind& transport_kind(std::string_view name);
// Probes whether a kind of link can be made on this machine, and opens its context. Throws
// InvalidArgument for an unknown name or a wrong setting.
OpenedTransport open_transport(std::string_view name, const Settings& settings);
// Makes a transport. Where the options have no context, it opens one without any settings. Throws
// InvalidArgument for an unknown name, or with the reason why there can be no such link here.
std::unique_ptr<Transport> make_transport(std::string_view name, const LinkOptions& options);

}  // namespace gradwire::transport
