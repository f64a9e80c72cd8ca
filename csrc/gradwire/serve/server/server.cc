#include "gradwire/serve/server/server.h"

#include <algorithm>
#include <exception>
#include <new>

#include "gradwire/base/error.h"
#include "gradwire/codec/simd/simd.h"

namespace gradwire::serve {
namespace {

// Replies that may be queued for a client. At so many, no more of its requests are read.
constexpr std::size_t kMostQueued = 8;
constexpr std::size_t kMostPulls = 8;
constexpr std::size_t kMostWaits = 64;
constexpr std::size_t kMostReason = 1000;  // bytes of a refusal's text, which may quote the client

constexpr const char* kNoMemory = "the server has no memory for what it asks for";

// Returns the front of a text, with whole UTF-8 characters only.
std::string_view shortened(std::string_view text) {
  std::size_t end = std::min(text.size(), kMostReason);
  while (end > 0 && end < text.size() && (text[end] & 0xC0) == 0x80) --end;
  return text.substr(0, end);
}

bool is_for_replicas(Op op) { return op == Op::kSet || op == Op::kPush || op == Op::kPull; }

}  // namespace

Server::Server(Options options)
    : options_(std::move(options)), poller_([this](Channel& channel) { return serve(channel); }) {
  if (options_.shard >= options_.shards)
    throw InvalidArgument(str_cat("there is no shard ", options_.shard, " of ", options_.shards));
}

Server::Server(Options options, Snapshot snapshot) : Server(std::move(options)) {
  const std::uint32_t of = snapshot.shard;
  shard_ = std::make_unique<Shard>(std::move(snapshot), options_.memory);
  if (of == options_.shard && shard_->table().shards == options_.shards) return;
  throw InvalidArgument(str_cat("the snapshot is of shard ", of, " of ", shard_->table().shards));
}

Server::~Server() { stop(); }

void Server::start() {
  const std::lock_guard lock(mutex_);
  running_ = true;
  thread_ = std::thread([this] { run(); });
}

void Server::run() {
  const codec::FloatEnvironment environment;
  while (!end_run()) {
    bool copies = false;
    try {
      pass();
      copies = copy_block();
    } catch (const std::exception& error) {  // not of one client: memory, mostly
      say(error.what());
    }
    poller_.wait(copies ? Deadline::at_once() : std::min(first_join_by_, round_due()));
  }
}

// Returns whether the thread is to end. It has then run all calls; callers run later ones.
bool Server::end_run() {
  const std::lock_guard lock(mutex_);
  if (!stopping_) return false;
  running_ = false;
  run_each(std::exchange(calls_, {}));
  while (copy_block()) continue;
  return true;
}

Deadline Server::round_due() const { return shard_ ? shard_->round_due() : Deadline::never(); }

bool Server::copy_block() { return shard_ && shard_->copy_block(); }

void Server::say(std::string_view line) const noexcept {
  try {
    if (options_.log) options_.log(line);
  } catch (const std::exception&) {
    // A log that fails has nobody to report it to.
  }
}

bool Server::turn() {
  poller_.wait(Deadline::at_once());
  return pass();
}

bool Server::pass() {
  bool moved = take_admitted();
  moved = run_calls() || moved;
  moved = poller_.round() || moved;
  if (first_join_by_.passed()) end_late_joins();
  moved = remove_ended() || moved;
  const std::string line = shard_ ? shard_->end_round_if_over() : "";
  if (options_.shard == 0 && !line.empty()) say(line);
  if (shard_ && shard_->version() != announced_version_) version_changed();
  return moved;
}

void Server::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    wanted_.notify_all();
  }
  poller_.wake();
  if (thread_.joinable()) thread_.join();
  const std::lock_guard lock(mutex_);
  arrivals_.clear();
  for (auto& [channel, peer] : peers_) {
    send_goodbye(*channel, {});
    poller_.remove(*channel);
  }
  peers_.clear();
}

bool Server::take_admitted() {
  std::vector<Peer> arrivals;
  {
    const std::lock_guard lock(mutex_);
    arrivals.swap(arrivals_);
  }
  for (Peer& peer : arrivals) {
    replace(peer);
    Channel& channel = *peer.channel;
    peers_.emplace(&channel, std::move(peer));
    poller_.add(channel);
    ++admitted_;
  }
  return !arrivals.empty();
}

// Says goodbye to a client; `why` is empty where the server stops.
void Server::send_goodbye(Channel& channel, std::string_view why) {
  MessageHeader goodbye;
  goodbye.flags = kFirst | kLast | kReply;
  channel.post(goodbye, std::as_bytes(std::span(why)));
  channel.send_queued();
  channel.flush();
}

// Ends the channel of an older incarnation of a client; or the newer channel, where it is not
// newer.
void Server::replace(const Peer& newer) {
  for (auto& [channel, peer] : peers_) {
    if (identity_of(peer.id) != identity_of(newer.id)) continue;
    if (peer.id < newer.id) {
      send_goodbye(*channel, str_cat("another client has ", kReplaced));
      channel->end("it has joined anew");
    } else {
      send_goodbye(*newer.channel, str_cat("a later client has ", kReplaced));
      newer.channel->end("it is joined already");
    }
    poller_.resume(*channel);
  }
}

bool Server::remove_ended() {
  bool removed = false;
  for (auto it = peers_.begin(); it != peers_.end();) {
    Peer& peer = it->second;
    if (!peer.channel->ended()) {
      ++it;
      continue;
    }
    poller_.remove(*peer.channel);
    const std::string why = peer.left ? peer.channel->peer() + ": left" : peer.channel->why();
    if (options_.shard == 0 || peer.expelled) say(why);
    if (shard_ && peer.joined) {
      if (!peer.left) shard_->statistics().count_gone(why);
      shard_->leave(peer.id);
    }
    it = peers_.erase(it);
    removed = true;
  }
  return removed;
}

// An invalid frame, or a lack of memory, ends only this channel.
bool Server::serve(Channel& channel) {
  Peer& peer = peers_.at(&channel);
  bool moved = false;
  try {
    moved = channel.send_queued();
    moved = send_frame(peer) || moved;
    if (takes_more(peer)) moved = take_message(peer) || moved;
    if (channel.queued() > 0) moved = channel.send_queued() || moved;
  } catch (const std::bad_alloc&) {
    expel(peer, kNoMemory);
  } catch (const std::exception& error) {
    expel(peer, error.what());
  }
  channel.flush();
  return moved;
}

// Reads nothing more from a client that does not read its replies. Pulls that wait for initial
// values do not count: these may come behind them.
bool Server::takes_more(const Peer& peer) const {
  const bool many_pulls = peer.pulls.size() >= kMostPulls && shard_->has_values();
  return peer.channel->queued() < kMostQueued && !many_pulls;
}

// Begins the first pull that waits; returns false where it was refused.
bool Server::begin_pull(Peer& peer) {
  const MessageHeader request = peer.pulls.front();
  peer.pulls.pop_front();
  try {
    peer.pull = shard().begin_pull(peer.id, request);
    return true;
  } catch (const NoRoom& error) {
    refuse(peer, request, {Refusal::kInvalid, error.what()});
    return false;
  }
}

// Sends the next frame of a pull, where there is room.
bool Server::send_frame(Peer& peer) {
  if (!peer.pull && !peer.pulls.empty() && shard().has_values() && !begin_pull(peer)) return true;
  if (!peer.pull) return false;
  const Bytes room = peer.channel->room();
  if (room.empty()) return false;
  MessageHeader header;
  header.table = shard().mark();
  const bool last = shard().pull_frame(peer.id, *peer.pull, header, room, peer.channel->copy());
  peer.channel->send(header);
  shard().statistics().sent += sizeof header + header.length;
  if (last) peer.pull.reset();
  return true;
}

bool Server::take_message(Peer& peer) {
  const auto message = peer.channel->next();
  if (!message) return false;
  handle(peer, *message);
  peer.channel->release();
  return true;
}

Shard& Server::shard() {
  if (!shard_) throw InvalidArgument("a request came before any table");
  return *shard_;
}

void Server::handle(Peer& peer, const ServeMessage& message) {
  const MessageHeader& header = message.header;
  if (header.has(kReply)) throw InvalidArgument("a client sent a reply");
  if (header.client != peer.id) throw InvalidArgument("a frame names another client");
  if (header.op == Op::kJoin) return join(peer, message);
  if (!peer.joined || header.table != shard().mark())
    throw InvalidArgument("a request came without the table that it is for");
  shard().statistics().received += sizeof header + message.payload.size();
  if (peer.role == ClientRole::kCoordinator && is_for_replicas(header.op))
    return refuse_coordinator(peer, header);
  switch (header.op) {
    case Op::kSet:
      return answer(peer, header, shard().set(peer.id, message));
    case Op::kPush:
      return answer(peer, header, shard().push(peer.id, message));
    case Op::kPull:
      if (peer.pulls.size() >= kMostPulls) throw InvalidArgument("too many pulls at a time");
      return peer.pulls.push_back(header);
    case Op::kWait:
      return wait(peer, header);
    case Op::kStats:
      return reply(peer, header, statistics_text());
    case Op::kSnapshot:
      return want_snapshot(peer, header);
    case Op::kAsk:
      return ask(peer, message);
    case Op::kBye:
      peer.left = true;
      return peer.channel->end("left");
    case Op::kJoin:
      return;
  }
}

void Server::answer(Peer& peer, const MessageHeader& request, const std::optional<Answer>& answer) {
  if (!answer) return;
  if (answer->refused != Refusal::kNone) {
    refuse(peer, request, *answer);
  } else {
    MessageHeader header = request;
    header.extra = answer->staleness;
    reply(peer, header);
  }
}

void Server::reply(Peer& peer, const MessageHeader& request, std::string_view text) {
  MessageHeader header = request;
  header.flags = kFirst | kLast | kReply;
  header.version = shard().version();
  header.table = shard().mark();
  const auto payload = std::as_bytes(std::span(text.substr(0, kMostPayload)));
  peer.channel->post(header, payload);
}

void Server::refuse(Peer& peer, const MessageHeader& request, const Answer& answer) {
  MessageHeader header = request;
  header.flags = kFirst | kLast | kReply | kRefused;
  header.count = static_cast<std::uint32_t>(answer.refused);
  header.extra = answer.staleness;
  header.version = shard_ ? shard_->version() : kNoVersion;
  peer.channel->post(header, std::as_bytes(std::span(shortened(answer.why))));
}

// Keeps a WAIT, or drops the one of this sequence number.
void Server::wait(Peer& peer, const MessageHeader& header) {
  if (header.extra != 0) {
    std::erase_if(peer.waits, [&](const auto& each) { return each.sequence == header.sequence; });
    return;
  }
  if (peer.waits.size() >= kMostWaits) throw InvalidArgument("too many waits at a time");
  peer.waits.push_back(header);
  version_changed();
}

// Answers clients that waited for the version of now, or for initial values.
void Server::version_changed() {
  announced_version_ = shard().version();
  if (!shard().has_values()) return;
  for (auto& [channel, peer] : peers_) {
    if (!peer.pulls.empty()) poller_.resume(*channel);
    try {
      answer_waits(peer);
    } catch (const std::bad_alloc&) {
      expel(peer, kNoMemory);
    }
  }
}

void Server::answer_waits(Peer& peer) {
  const auto passed = std::ranges::stable_partition(
      peer.waits, [&](const auto& each) { return each.version > shard().version(); });
  if (passed.empty()) return;
  poller_.resume(*peer.channel);
  for (const MessageHeader& request : passed) reply(peer, request);
  peer.waits.erase(passed.begin(), passed.end());
}

std::string Server::statistics_text() {
  std::vector<std::string> clients;
  for (const auto& [channel, peer] : peers_)
    if (peer.joined) clients.push_back(channel->peer());
  if (shard_ && shard_->vectors())
    shard_->statistics().last_batch = shard_->vectors()->last_batch();
  return shard_ ? shard_->statistics().json(shard_->version(), clients)
                : Statistics{}.json(kNoVersion, clients);
}

}  // namespace gradwire::serve
