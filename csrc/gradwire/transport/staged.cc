#include "gradwire/transport/staged.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>

#include "gradwire/base/error.h"
#include "gradwire/transport/handshake.h"

namespace gradwire::transport {

StagedTransport::StagedTransport(std::string_view name, const LinkOptions& options,
                                 bool has_doorbell)
    : name_(name),
      options_(options),
      epoll_(has_doorbell ? make_epoll() : UniqueFd()),
      peers_(at(options.size)) {
  open_.peers.reserve(peers_.size());
}

void StagedTransport::offer(Connection connection, Rank peer) {
  if (peer < 0 || peer >= options_.size || peer == options_.rank)
    throw InvalidArgument(describe(link_id(peer), "there is no such peer"));
  PeerState& state = peers_[at(peer)];
  if (state.linked || state.connection.valid())
    throw InvalidArgument(describe(link_id(peer), "is made already"));
  try {
    send_hello(connection.stream(), link_id(peer), options_, connection.counts());
    introduce(connection.stream(), peer);
  } catch (const TransportError&) {  // it is gone; complete() reads what it sent last
  }
  state.connection = std::move(connection);
}

// Receives all hellos first: a live peer must not wait while this rank waits for another one.
void StagedTransport::complete(const WaitLimit& wait_limit) try {
  const auto each_offered = [this](const auto& body) {
    for (Rank peer = 0; peer < options_.size; ++peer)
      if (connection(peer).valid() && !peers_[at(peer)].linked) body(peer);
  };
  each_offered([&](Rank peer) {
    receive_hello(connection(peer).stream(), link_id(peer), options_, wait_limit,
                  connection(peer).counts());
  });
  each_offered([&](Rank peer) {
    connect(peer, wait_limit);
    peers_[at(peer)].linked = true;
  });
} catch (...) {
  for (PeerState& peer : peers_)
    if (!peer.linked) peer.connection = {};
  throw;
}

void StagedTransport::disconnect(Rank peer) noexcept {
  if (connection(peer).valid()) unwatch(epoll_.get(), connection(peer).socket.get());
  connection(peer) = {};
}

void StagedTransport::answer_bells() {
  if (!epoll_.valid()) return;
  std::array<epoll_event, 64> events;
  const int ready = ::epoll_wait(epoll_.get(), events.data(), events.size(), 0);
  for (int i = 0; i < ready; ++i)
    if (const Rank peer = events[at(i)].data.fd; peer != kNoPeer) answer_bell(peer);
}

void StagedTransport::answer_bell(Rank peer) {
  std::array<char, 64> rings;
  const ssize_t got =
      ::recv(connection(peer).socket.get(), rings.data(), rings.size(), MSG_DONTWAIT);
  if (got <= 0 && !(got < 0 && would_block(errno))) disconnected(peer);
}

std::vector<Rank> StagedTransport::peers() const {
  std::vector<Rank> linked;
  for (std::size_t i = 0; i < peers_.size(); ++i)
    if (peers_[i].linked) linked.push_back(static_cast<Rank>(i));
  return linked;
}

StagedTransport::PeerState& StagedTransport::linked(Rank peer) {
  if (peer < 0 || peer >= options_.size || !peers_[at(peer)].linked)
    throw InvalidArgument(describe(link_id(peer), "there is none"));
  return peers_[at(peer)];
}

void StagedTransport::mark_gone(Rank peer, const std::string& reason) {
  std::string& gone = peers_[at(peer)].gone;
  if (gone.empty()) gone = reason;
}

void StagedTransport::throw_if_gone(Rank peer) const {
  const std::string& gone = peers_[at(peer)].gone;
  if (!gone.empty()) throw_transport_error(link_id(peer), gone);
}

Bytes StagedTransport::reserve(std::span<const Rank> peers, std::size_t bytes) {
  if (peers.empty()) throw InvalidArgument("reserve() needs a peer to send to");
  for (Rank peer : peers) {
    linked(peer);
    throw_if_gone(peer);
  }
  if (bytes > options_.max_message)
    throw InvalidArgument(
        describe(link_id(peers.front()), str_cat("a message of ", bytes, " bytes exceeds the ",
                                                 options_.max_message, " bytes of max_message")));
  open_.cell = kNoCell;
  for (Rank peer : peers)
    if (has_most_unread(peer)) return {};
  open_.cell = find_room(peers, bytes);
  if (open_.cell == kNoCell) return {};
  open_.bytes = bytes;
  open_.peers.assign(peers.begin(), peers.end());
  return {staging(open_.cell), bytes};
}

void StagedTransport::commit(std::size_t bytes) {
  if (open_.cell == kNoCell || bytes > open_.bytes)
    throw InvalidArgument(str_cat("commit() of ", bytes, " bytes exceeds the open reservation"));
  const int cell = std::exchange(open_.cell, kNoCell);
  for (Rank peer : open_.peers) throw_if_gone(peer);
  post(cell, bytes, open_.peers);
  for (Rank peer : open_.peers) throw_if_gone(peer);
}

std::optional<ConstBytes> StagedTransport::peek(Rank peer) {
  PeerState& state = linked(peer);
  if (!state.front) state.front = arrived(peer);
  if (!state.front) throw_if_gone(peer);
  return state.front;
}

void StagedTransport::release(Rank peer) {
  PeerState& state = linked(peer);
  if (!state.front) throw InvalidArgument(describe(link_id(peer), "release() without peek()"));
  state.front.reset();
  consume(peer);
}

}  // namespace gradwire::transport
