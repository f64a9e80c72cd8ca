// A Transport moves messages (bytes) between this rank and the peers it has links to, in order per
// pair and direction. It only stages them: an encoder writes straight into what the link sends, a
// decoder reads straight from what the link received.
//
// One thread at a time uses a Transport: the communicator's driver. Nothing here blocks but
// complete() and adopt(); the driver sleeps on the doorbell() of all its transports at once. Every
// call that finds a peer gone throws TransportError with that peer; what a peer sent before it went
// can still be peeked first.
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

// Wakes the rank at the other end of a link, by a socket that both ends poll anyway.
class Bells {
 public:
  virtual void ring(Rank peer) noexcept = 0;

 protected:
  ~Bells() = default;
};

struct Options {
  Rank rank = 0;
  int size = 1;
  std::size_t max_message = kUsualFrame;  // bytes of the largest message, the same on all ranks
  int messages = 16;                      // staged at a time, by one sender over all its peers;
                                          // the smallest ones may need no staging
  int messages_per_peer = 16;             // of these, to one peer: a slow reader holds up no other
  std::shared_ptr<Context> context{};     // this process's, of open_transport()
  // On all ranks or none, and alive as long as the transport: links over shared memory keep no
  // socket then, and end() tells them of a peer's end. Null: each keeps its own.
  Bells* bells = nullptr;
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual std::string_view name() const noexcept = 0;
  virtual std::size_t max_message() const noexcept = 0;

  // Takes over a connected, authenticated socket to `peer` and sends over it what the other end
  // waits for in complete(). Does not block. What goes over it later is sealed where it has keys,
  // if it goes over the socket at all.
  virtual void offer(Connection connection, Rank peer) = 0;
  // Waits for the other ends' offers, within `wait_limit`, and makes all links that were offered.
  // Blocks; at set-up only.
  virtual void complete(const WaitLimit& wait_limit) = 0;
  // Calls offer() and complete(). Two ends that wait for each other before each has offered must
  // not use it.
  void adopt(Connection connection, Rank peer, double timeout_seconds) {
    offer(std::move(connection), peer);
    complete(Deadline::after(timeout_seconds));
  }
  // Tells that all peers were offered: what only offers need is let go.
  virtual void close_offers() noexcept {}
  virtual std::vector<Rank> peers() const = 0;
  // Tells of a peer's end, which a link without a socket of its own cannot see (Options::bells).
  virtual void end(Rank /*peer*/) noexcept {}

  // Lets a peer have at most so many unread messages from now on, where that is fewer than
  // Options::messages_per_peer. A kind of link that cannot tell what a peer has read ignores it.
  virtual void limit_unread(int /*messages*/) noexcept {}

  // Returns staging for one message to be sent to each of `peers` (not empty, all linked, each
  // once), 64-byte aligned. data() is null when there is no room now: try again after the doorbell.
  // At most one reservation is open: another reserve() replaces it.
  virtual Bytes reserve(std::span<const Rank> peers, std::size_t bytes) = 0;
  // Returns how to copy large data into the open reservation; the reader reads first what was
  // written there last.
  virtual Copy copy() const noexcept { return copy_cached; }
  // Sends the first `bytes` of the open reservation.
  virtual void commit(std::size_t bytes) = 0;
  // Pushes out what commit() could not send at once; returns true when nothing of it is left. Only
  // links that buffer (tcp, rdma) have anything to do.
  virtual bool flush() { return true; }
  // Returns whether nothing is left to be pushed out to this peer.
  virtual bool is_flushed(Rank /*peer*/) const { return true; }

  // Returns the oldest message from `peer` that was not released; nullopt when none has arrived
  // whole. It stays in place, 8-byte aligned, until release(peer). Empty messages count.
  virtual std::optional<ConstBytes> peek(Rank peer) = 0;
  virtual void release(Rank peer) = 0;

  // Returns a descriptor that polls readable when something may have changed, provided arm() was
  // called and nothing had changed since: arm(), look once more, poll, disarm(). disarm() clears
  // the doorbell. It is -1 where only the Options' bells tell.
  virtual int doorbell() const noexcept = 0;
  virtual void arm() = 0;
  virtual void disarm() = 0;
};

// Returns all kinds of link, best first. inproc is never chosen for a pair by itself: its ranks
// share a process (spawn with threads). emulated is chosen where GRADWIRE_LINK asks for it, and
// then alone.
std::span<const Kind* const> transport_kinds();
// Returns the kind of that name; throws InvalidArgument for an unknown one.
const Kind& transport_kind(std::string_view name);
// Finds out whether a kind of link can be made here, and opens its context. Throws InvalidArgument
// for an unknown name or a wrong setting.
Opened open_transport(std::string_view name, const Settings& settings);
// Makes a transport. Where the options have no context, it opens one without any settings. Throws
// InvalidArgument for an unknown name, or with the reason why there can be no such link here.
std::unique_ptr<Transport> make_transport(std::string_view name, const Options& options);

}  // namespace gradwire::transport
