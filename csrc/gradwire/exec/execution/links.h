// Links: the transports of one lane of a communicator. Each pair of ranks uses the best one that it
// has. Which transport serves a peer is fixed when its link is offered; callers name peers only.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "gradwire/base/error.h"
#include "gradwire/base/fd.h"
#include "gradwire/transport/transport.h"

namespace gradwire::exec {

class Links {
 public:
  explicit Links(transport::LinkOptions options, transport::Contexts contexts = {});

  // Offers a link, see Transport::offer. Makes the transport if this is its first link.
  void offer(std::string_view transport, transport::Connection connection, Rank peer);
  // Returns whether a link to every peer was offered.
  bool offered_all() const noexcept;
  // Makes all links that were offered.
  void complete(const WaitLimit& wait_limit);
  // Reports that a peer is gone; see Transport::end.
  void end(Rank peer) noexcept {
    if (link_of_[at(peer)] >= 0) link(peer).end(peer);
  }

  std::size_t max_message() const noexcept { return options_.max_message; }
  // Returns one number per peer: peers with the same number share a transport and can share
  // staging.
  const std::vector<int>& link_of() const noexcept { return link_of_; }

  // All peers must be on one transport. A reserve() replaces a reservation that was not committed.
  Bytes reserve(std::span<const Rank> peers, std::size_t bytes) {
    open_ = &link(peers[0]);
    return open_->reserve(peers, bytes);
  }
  // Returns whether the open reservation is in memory that its readers share.
  bool in_shared_memory() const;
  // See Transport::copy.
  Copy copy() const noexcept { return open_->copy(); }
  void commit(std::size_t bytes) { open_->commit(bytes); }
  std::optional<ConstBytes> peek(Rank peer) { return link(peer).peek(peer); }
  void release(Rank peer) { link(peer).release(peer); }

  // Returns whether all staged bytes are out of this process's hands.
  bool flush();
  bool is_flushed(Rank peer) const { return link(peer).is_flushed(peer); }
  // See Transport::deliver.
  bool deliver();
  // Returns some peer whose socket is full, or kNoPeer.
  Rank full_peer() const;
  void arm();
  void disarm();
  const std::vector<int>& doorbells() const noexcept { return doorbells_; }

 private:
  transport::Transport& link(Rank peer) const { return *transports_[at(link_of_[at(peer)])]; }

  std::unique_ptr<transport::Transport> make(std::string_view transport) const;

  transport::LinkOptions options_;
  transport::Contexts contexts_;
  std::vector<std::unique_ptr<transport::Transport>> transports_;
  std::vector<int> link_of_;  // by peer; -1 for none
  std::vector<int> doorbells_;
  transport::Transport* open_ = nullptr;
};

}  // namespace gradwire::exec
