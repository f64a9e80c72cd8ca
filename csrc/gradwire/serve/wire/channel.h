// Channel: one client's connection to one shard, over a transport between the two; both ends use
// this class. It is the service's failure domain: when a channel ends, nothing else does.
//
// Small messages are queued, and sent before the frames of bulk data, for which the sender asks for
// room one by one. One thread at a time uses a channel. Only make() blocks. No call throws because
// the peer has ended: ended() says so.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "gradwire/base/copy.h"
#include "gradwire/base/fd.h"
#include "gradwire/base/wait_limit.h"
#include "gradwire/serve/wire/message.h"
#include "gradwire/transport/transport.h"

namespace gradwire::serve {

// The most frames that a sender may have staged at a time.
inline constexpr int kWindow = 4;

// Which end of a channel a process is: the rank in its transport.
enum class End : Rank { kServer = 0, kClient = 1 };

// The options of a channel's transport.
transport::LinkOptions channel_options(End end,
                                       std::shared_ptr<transport::TransportContext> context = {});

class Channel {
 public:
  // `peer` names the other end, in errors: "shard 1 (host:pid)". The transport joins ranks 0 and 1.
  Channel(std::unique_ptr<transport::Transport> transport, std::string peer);

  // Makes a channel over a connected, authenticated socket. Blocks until the other end has agreed;
  // throws Timeout or TransportError that names it.
  static std::unique_ptr<Channel> make(End end, std::string_view transport,
                                       std::shared_ptr<transport::TransportContext> context,
                                       transport::Connection connection, std::string peer,
                                       const WaitLimit& wait_limit);

  const std::string& peer() const noexcept { return peer_; }

  // Queues a small message, with a copy of the payload.
  void post(MessageHeader header, ConstBytes payload = {});
  // Returns the number of messages that wait to be sent.
  std::size_t queued() const noexcept { return queue_.size(); }
  // Sends queued messages, as far as there is room. Returns whether any was sent.
  bool send_queued();
  // Returns kMostPayload bytes of room for the payload of a bulk frame, which send() then sends.
  // Empty when messages are queued, there is no room now, or the peer has `most` unread frames (if
  // the transport can tell). send_queued() and another room() give the room up.
  Bytes room(int most = kWindow);
  Copy copy() const noexcept { return transport_->copy(); }
  void send(const MessageHeader& header);

  // Returns the oldest message that was not released. An invalid frame ends the channel.
  std::optional<ServeMessage> next();
  void release();

  // Ends the channel. Does nothing when it has ended.
  void end(std::string why);
  // Sends what the transport still holds. Returns whether nothing is left.
  bool flush();
  bool ended() const noexcept { return ended_; }
  // Returns why it ended: "shard 1 (host:pid): the peer closed it or died".
  std::string why() const { return peer_ + ": " + why_; }

  // As those of Transport.
  int doorbell() const noexcept { return transport_->doorbell(); }
  void arm();
  void disarm();

 private:
  template <typename Body>
  std::invoke_result_t<Body> guarded(Body body);

  std::unique_ptr<transport::Transport> transport_;
  std::string peer_;
  Rank rank_;  // the peer's in the transport
  std::deque<std::vector<std::byte>> queue_;
  Bytes open_;  // the reservation behind room()
  bool ended_ = false;
  std::string why_;
};

}  // namespace gradwire::serve
