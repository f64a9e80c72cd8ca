// Channel: one client's connection to one shard, over a transport between the two. Both ends use
// it. It is the failure domain of the service: when a channel ends, nothing else does.
//
// Small messages are queued, and sent before the frames of bulk data, for which the sender asks one
// by one when there is room. One thread at a time uses a channel. Nothing here blocks or throws for
// the peer's end.
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

// Frames that a sender may have under way.
inline constexpr int kWindow = 4;

// Which end of its transport a process is.
enum class End : Rank { kServer = 0, kClient = 1 };

// The options of a channel's transport.
transport::Options channel_options(End end, std::shared_ptr<transport::Context> context = {});

class Channel {
 public:
  // `peer` names the other end, in errors: "shard 1 (host:pid)". The transport joins ranks 0 and 1.
  Channel(std::unique_ptr<transport::Transport> transport, std::string peer);

  // Makes a channel over a connected, authenticated socket. Blocks until the other end has agreed;
  // throws Timeout or TransportError that names it.
  static std::unique_ptr<Channel> make(End end, std::string_view transport,
                                       std::shared_ptr<transport::Context> context,
                                       transport::Connection connection, std::string peer,
                                       const WaitLimit& wait_limit);

  const std::string& peer() const noexcept { return peer_; }

  // Queues a small message; its payload is copied.
  void post(MessageHeader header, ConstBytes payload = {});
  // Returns the number of messages that wait to be sent.
  std::size_t queued() const noexcept { return queue_.size(); }
  // Sends what waits, as far as there is room. Returns whether something was sent.
  bool send_queued();
  // Returns room for the payload of a bulk frame, of kMostPayload bytes; empty when messages wait,
  // there is none now, or the peer has `most` unread frames, if the transport can tell. send() uses
  // it; send_queued() and another room() give it up.
  Bytes room(int most = kWindow);
  Copy copy() const noexcept { return transport_->copy(); }
  void send(const MessageHeader& header);

  // Returns the oldest message that was not released. A frame that is none ends the channel.
  std::optional<Message> next();
  void release();

  // Ends the channel. Does nothing when it has ended.
  void end(std::string why);
  // Pushes out what the transport still holds. Returns whether nothing is left.
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
