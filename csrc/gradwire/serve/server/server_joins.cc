// How clients join: with the table of parameters that all of them must have, and in a role.
#include <algorithm>
#include <new>

#include "gradwire/base/error.h"
#include "gradwire/serve/server/server.h"

namespace gradwire::serve {
namespace {

constexpr std::size_t kMostTexts = 2 * kMostTableText;

}  // namespace

void Server::join(Peer& peer, const ServeMessage& message) {
  const MessageHeader& header = message.header;
  take_text(peer, message);
  if (!header.has(kLast)) return limit_texts();
  try {
    accept_table(peer, header);
    accept_role(peer, header);
    peer.joined = true;
    if (peer.role == ClientRole::kReplica) shard_->join(peer.id);
    if (options_.shard == 0) say(peer.channel->peer() + ": joined");  // once for all shards
    reply(peer, header);
  } catch (const InvalidArgument& error) {
    refuse(peer, header, {Refusal::kInvalid, error.what()});
  } catch (const std::bad_alloc&) {
    refuse(peer, header, {Refusal::kInvalid, "there is no memory for so many parameters"});
  }
  peer.table = {};
  peer.join_by = Deadline::never();
}

void Server::take_text(Peer& peer, const ServeMessage& message) {
  if (peer.joined) throw InvalidArgument("join: it is joined already");
  if (message.header.has(kFirst)) {
    peer.table.clear();
    peer.began = ++joins_;
    peer.join_by = Deadline::after(options_.join_seconds);
    first_join_by_ = std::min(first_join_by_, peer.join_by);
  }
  peer.table += text_of(message.payload);
  if (peer.table.size() > kMostTableText) throw InvalidArgument("join: its table is too long");
}

// Limits the memory of all incomplete JOINs together: ends the client that began first.
void Server::limit_texts() {
  std::size_t bytes = 0;
  Peer* oldest = nullptr;
  for (auto& [channel, peer] : peers_) {
    bytes += peer.table.size();
    if (!peer.table.empty() && (!oldest || peer.began < oldest->began)) oldest = &peer;
  }
  if (bytes <= kMostTexts) return;
  oldest->table = {};
  expel(*oldest, "join: others' tables take the memory, and its own was not complete");
}

// Ends clients whose JOIN is not complete in time.
void Server::end_late_joins() {
  first_join_by_ = Deadline::never();
  for (auto& [channel, peer] : peers_) {
    if (peer.join_by.passed()) {
      peer.join_by = Deadline::never();
      send_goodbye(*channel, "the rest of its table did not come in time");
      expel(peer, "join: the rest of its table did not come in time");
    }
    first_join_by_ = std::min(first_join_by_, peer.join_by);
  }
}

// Ends a client's channel for a reason that the other shards may not know.
void Server::expel(Peer& peer, std::string_view why) {
  peer.expelled = true;
  peer.channel->end(std::string(why));
}

void Server::refuse_if_too_large(const ParameterTable& table) const {
  const std::uint64_t elements = table.elements() / table.shards;
  const std::uint64_t pushes = !table.staged() && elements > kMostFrame ? 1 : 0;
  const std::uint64_t copies = 1 + make_rule(table.rule).states.size() + pushes;
  const std::uint64_t bytes = elements * table.words() * sizeof(float) * copies;
  if (bytes <= options_.memory) return;
  throw InvalidArgument(str_cat("the parameters of shard ", options_.shard,
                                ", with the state of their rule and a push, take ",
                                gibibytes(bytes), ", and its server may use ",
                                gibibytes(options_.memory), ": start more shards, on more hosts"));
}

void Server::accept_table(Peer& peer, const MessageHeader& header) {
  ParameterTable table = ParameterTable::parse(peer.table);
  if (header.extra != options_.shard || table.shards != options_.shards)
    throw InvalidArgument(str_cat("this is shard ", options_.shard, " of ", options_.shards,
                                  ", not shard ", header.extra, " of ", table.shards));
  if (!shard_) {
    refuse_if_too_large(table);
    shard_ = std::make_unique<Shard>(std::move(table), options_.shard, options_.memory);
    if (frame_log_) shard_->log_to(frame_log_);
  } else if (table != shard_->table()) {
    throw InvalidArgument("the servers hold other parameters: " +
                          difference(table, shard_->table()) + ", as the first client had it");
  }
}

// A new coordinator replaces older ones: one that was suspended and goes on later must not change
// vectors any more.
void Server::accept_role(Peer& peer, const MessageHeader& header) {
  if (header.first > static_cast<std::uint64_t>(ClientRole::kCoordinator))
    throw InvalidArgument(str_cat("there is no role ", header.first, " of clients"));
  peer.role = static_cast<ClientRole>(header.first);
  if (peer.role != ClientRole::kCoordinator) return;
  for (auto& [channel, other] : peers_) {
    if (&other == &peer || !other.joined || other.role != ClientRole::kCoordinator) continue;
    send_goodbye(*channel, "another coordinator has joined: " + peer.channel->peer());
    channel->end("another coordinator has joined");
    poller_.resume(*channel);
  }
}

// Refuses a request when its last frame has come, as it would be answered.
void Server::refuse_coordinator(Peer& peer, const MessageHeader& request) {
  if (request.op != Op::kPull && !request.has(kLast)) return;
  refuse(peer, request,
         {Refusal::kInvalid,
          "a coordinator has no access to the parameters; it gives commands to "
          "vectors by ask"});
}

void Server::ask(Peer& peer, const ServeMessage& message) {
  try {
    const bool may_change = peer.role == ClientRole::kCoordinator;
    const std::vector<std::byte> results = shard().ask(message.payload, may_change);
    reply(peer, message.header, text_of(results));
  } catch (const InvalidArgument& error) {
    refuse(peer, message.header, {Refusal::kInvalid, error.what()});
  } catch (const std::bad_alloc&) {
    refuse(peer, message.header, {Refusal::kInvalid, "there is no memory for another vector"});
  }
}

}  // namespace gradwire::serve
