// What a server does for a coordinator, and what it refuses to one.
#include <new>

#include "gradwire/base/error.h"
#include "gradwire/serve/server/server.h"

namespace gradwire::serve {

// A coordinator that comes takes the place of those that are there: one that was stopped and goes
// on later must not change vectors any more.
void Server::accept_role(Peer& peer, const MessageHeader& header) {
  if (header.first > static_cast<std::uint64_t>(Role::kCoordinator))
    throw InvalidArgument("there is no role " + std::to_string(header.first) + " of clients");
  peer.role = static_cast<Role>(header.first);
  if (peer.role != Role::kCoordinator) return;
  for (auto& [channel, other] : peers_) {
    if (&other == &peer || !other.joined || other.role != Role::kCoordinator) continue;
    dismiss(*channel, "another coordinator has joined: " + peer.channel->peer());
    channel->end("another coordinator has joined");
    poller_.rouse(*channel);
  }
}

// Refuses with the last frame of a request, as it would be answered.
void Server::refuse_coordinator(Peer& peer, const MessageHeader& request) {
  if (request.op != Op::kPull && !request.has(kLast)) return;
  refuse(peer, request,
         {Refusal::kInvalid,
          "a coordinator has no access to the parameters; it gives commands to "
          "vectors by ask"});
}

void Server::ask(Peer& peer, const Message& message) {
  try {
    const bool may_change = peer.role == Role::kCoordinator;
    const std::vector<std::byte> results = shard().ask(message.payload, may_change);
    reply(peer, message.header, text_of(results));
  } catch (const InvalidArgument& error) {
    refuse(peer, message.header, {Refusal::kInvalid, error.what()});
  } catch (const std::bad_alloc&) {
    refuse(peer, message.header, {Refusal::kInvalid, "there is no memory for another vector"});
  }
}

}  // namespace gradwire::serve
