// StagedTransport: base of all transports but emulated. It checks arguments, and keeps the peers'
// sockets and the doorbell, the open reservation, each peer's front message and who is gone. A kind
// of link implements the virtual steps below.
#pragma once

#include <string>
#include <vector>

#include "gradwire/transport/socket.h"
#include "gradwire/transport/transport.h"

namespace gradwire::transport {

class StagedTransport : public Transport {
 public:
  // `name` must outlive the transport (a literal).
  StagedTransport(std::string_view name, const LinkOptions& options, bool has_doorbell = true);

  std::string_view name() const noexcept final { return name_; }
  std::size_t max_message() const noexcept final { return options_.max_message; }
  void offer(Connection connection, Rank peer) final;
  void complete(const WaitLimit& wait_limit) final;
  std::vector<Rank> peers() const final;
  Bytes reserve(std::span<const Rank> peers, std::size_t bytes) final;
  void commit(std::size_t bytes) final;
  std::optional<ConstBytes> peek(Rank peer) final;
  void release(Rank peer) final;
  int doorbell() const noexcept final { return epoll_.get(); }

 protected:
  static constexpr int kNoCell = -1;

  // Sends what connect() at the other end waits for. Does not block.
  virtual void introduce(const Stream& /*to*/, Rank /*peer*/) {}
  // Makes the link over connection(peer), whose other end agreed to the LinkOptions.
  virtual void connect(Rank peer, const WaitLimit& wait_limit) = 0;
  // Returns whether the peer has LinkOptions::messages_per_peer unread messages.
  virtual bool has_most_unread(Rank peer) = 0;
  // Returns a cell (the staging memory of one message) that no reader needs any more, for `bytes`
  // bytes; kNoCell where there is none.
  virtual int find_room(std::span<const Rank> peers, std::size_t bytes) = 0;
  virtual std::byte* staging(int cell) noexcept = 0;
  // Sends the first `bytes` of the cell. Marks a peer that it finds gone, and does not throw for
  // it.
  virtual void post(int cell, std::size_t bytes, std::span<const Rank> peers) = 0;
  // Returns the next message of a peer, in place. Marks a peer that it finds gone, and does not
  // throw for it.
  virtual std::optional<ConstBytes> arrived(Rank peer) = 0;
  virtual void consume(Rank peer) = 0;
  // Is called by answer_bells() where a peer has closed its socket or died.
  virtual void disconnected(Rank /*peer*/) {}

  // Returns the peer's socket; closed once disconnect() was called.
  Connection& connection(Rank peer) noexcept { return peers_[at(peer)].connection; }
  // Lets a descriptor ring the doorbell. `peer` is the one whose socket it is, or kNoPeer.
  void watch_descriptor(int descriptor, std::uint32_t events, Rank peer) {
    watch(epoll_.get(), descriptor, events, peer);
  }
  void disconnect(Rank peer) noexcept;
  // Reads what made watched sockets ring.
  void answer_bells();
  void answer_bell(Rank peer);

  const LinkOptions& options() const noexcept { return options_; }
  LinkId link_id(Rank peer) const noexcept { return {name_, options_.rank, peer}; }
  void mark_gone(Rank peer, const std::string& reason);
  void throw_if_gone(Rank peer) const;
  // Returns why a peer is gone; empty while it is there.
  const std::string& why_gone(Rank peer) const noexcept { return peers_[at(peer)].gone; }

 private:
  struct PeerState {
    Connection connection;
    bool linked = false;
    std::string gone;  // why the peer is gone; empty while it is there
    std::optional<ConstBytes> front;
  };
  struct Reservation {
    int cell = kNoCell;
    std::size_t bytes = 0;
    std::vector<Rank> peers;
  };
  PeerState& linked(Rank peer);

  std::string_view name_;
  LinkOptions options_;
  UniqueFd epoll_;  // the doorbell
  std::vector<PeerState> peers_;
  Reservation open_;
};

}  // namespace gradwire::transport
