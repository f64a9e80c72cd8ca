#include "gradwire/exec/execution/point_to_point.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "gradwire/base/error.h"
#include "gradwire/codec/lossless.h"

namespace gradwire::exec {
namespace {

// Returns a hash of the size, by which both ends check that they mean messages of the same size.
std::uint32_t size_fingerprint(std::size_t bytes) {
  return static_cast<std::uint32_t>(bytes ^ (static_cast<std::uint64_t>(bytes) >> 32));
}

// Returns the bytes of a packed payload; 0 where it is to travel as it is.
std::size_t pack(const Transfer& transfer, ConstBytes plain, Bytes out, const Links& links) {
  if (!transfer.packed_as || links.in_shared_memory()) return 0;
  return codec::pack(*transfer.packed_as, plain, out);
}

}  // namespace

PointToPoint::PointToPoint(Rank rank, int size, std::uint32_t communicator)
    : rank_(rank),
      size_(size),
      communicator_(communicator),
      sent_(at(size)),
      received_(at(size)),
      gone_(at(size)) {
  gone_[at(rank)] = true;
}

void PointToPoint::send(Transfer transfer) {
  if (transfer.peer != rank_) return sends_.push_back(std::move(transfer));
  own_.push_back(std::move(transfer));
  own_.back().work->finish(nullptr);
}

bool PointToPoint::advance(Links& links, TrafficCounter& traffic, Observer* observer) {
  bool progressed = false;
  observer_ = observer;
  if (!sends_.empty()) links.flush();
  busy_.assign(at(size_), false);  // a peer's messages leave in order
  for (auto each = sends_.begin(); each != sends_.end();) {
    if (!busy_[at(each->peer)]) progressed |= advance_send(*each, links, traffic);
    busy_[at(each->peer)] = true;
    const bool over = each->started() && each->moved == each->size && links.is_flushed(each->peer);
    if (!over) {
      ++each;
      continue;
    }
    ++sent_[at(each->peer)];
    each->work->finish(nullptr);
    each = sends_.erase(each);
  }
  if (!own_.empty()) progressed |= receive_own();
  for (Rank peer = 0; peer < size_ && !receives_.empty(); ++peer)
    if (peer != rank_) progressed |= advance_receive(links, peer);
  return progressed;
}

FrameHeader PointToPoint::header_of(const Transfer& transfer, std::uint32_t operation) const {
  FrameHeader header;
  header.communicator = communicator_;
  header.operation = operation;
  header.fingerprint = size_fingerprint(transfer.size);
  header.segment = transfer.frames;
  header.flags = kFramePointToPoint;
  return header;
}

bool PointToPoint::advance_send(Transfer& transfer, Links& links, TrafficCounter& traffic) {
  bool progressed = false;
  const Rank peers[] = {transfer.peer};
  while (!transfer.started() || transfer.moved < transfer.size) {
    FrameHeader header = header_of(transfer, sent_[at(transfer.peer)]);
    const std::size_t length =
        std::min(transfer.size - transfer.moved, links.max_message() - sizeof header);
    const Bytes staging = links.reserve(peers, sizeof header + length);
    if (staging.empty()) break;
    will_move();
    const ConstBytes plain(transfer.data + transfer.moved, length);
    const std::size_t packed = pack(transfer, plain, staging.subspan(sizeof header), links);
    if (packed > 0) header.flags |= kFramePacked;
    if (packed == 0) links.copy()(staging.data() + sizeof header, plain.data(), length);
    header.length = static_cast<std::uint32_t>(packed > 0 ? packed : length);
    const std::size_t bytes = sizeof header + header.length;
    std::memcpy(staging.data(), &header, sizeof header);
    links.commit(bytes);
    traffic.add(bytes, 1);
    transfer.moved += length;
    has_moved({true, transfer.peer, header.operation, transfer.frames++, bytes});
    progressed = true;
  }
  return progressed;
}

// Returns the first posted recv that takes a message from `peer`.
std::deque<Transfer>::iterator PointToPoint::match(Rank peer) {
  const Rank any = gone_[at(peer)] ? peer : Transfer::kAnyRank;
  return std::find_if(receives_.begin(), receives_.end(),
                      [=](const Transfer& each) { return each.peer == peer || each.peer == any; });
}

// Returns a peer's message, if it has arrived. A recv from any rank goes on while some rank can
// still send: a rank that closed cleanly is no failure, and the control plane reports one that did
// not.
std::optional<ConstBytes> PointToPoint::arrived(const Transfer& transfer, Links& links, Rank peer) {
  if (transfer.peer == peer) return links.peek(peer);
  try {
    return links.peek(peer);
  } catch (const TransportError&) {
    gone_[at(peer)] = true;
    if (std::find(gone_.begin(), gone_.end(), false) == gone_.end()) throw;
    return std::nullopt;
  }
}

bool PointToPoint::advance_receive(Links& links, Rank peer) {
  bool progressed = false;
  for (auto transfer = match(peer); transfer != receives_.end(); transfer = match(peer)) {
    const auto message = arrived(*transfer, links, peer);
    if (!message && gone_[at(peer)]) continue;
    if (!message) break;
    transfer->peer = peer;
    const std::size_t bytes = message->size();
    will_move();
    land(*transfer, *message);
    links.release(peer);
    has_moved({false, peer, received_[at(peer)], transfer->frames - 1, bytes});
    progressed = true;
    if (transfer->moved < transfer->size) continue;
    ++received_[at(peer)];
    transfer->work->finish(nullptr, peer);
    receives_.erase(transfer);
  }
  return progressed;
}

bool PointToPoint::receive_own() {
  bool progressed = false;
  for (auto each = receives_.begin(); each != receives_.end() && !own_.empty();) {
    if (each->peer != rank_ && each->peer != Transfer::kAnyRank) {
      ++each;
      continue;
    }
    const Transfer& message = own_.front();
    if (message.size != each->size) throw wrong_size(*each, rank_);
    if (message.size > 0) std::memcpy(each->data, message.data, message.size);
    each->work->finish(nullptr, rank_);
    each = receives_.erase(each);
    own_.pop_front();
    progressed = true;
  }
  return progressed;
}

InvalidArgument PointToPoint::wrong_size(const Transfer& transfer, Rank sender) const {
  return InvalidArgument(name_of(rank_) + ": rank " + std::to_string(sender) +
                         " sent a message of another size than the " +
                         std::to_string(transfer.size) +
                         " bytes that recv() expects; send and recv must agree on the size");
}

void PointToPoint::land(Transfer& transfer, ConstBytes message) {
  FrameHeader header, expected = header_of(transfer, received_[at(transfer.peer)]);
  const std::string who = name_of(rank_) + ": rank " + std::to_string(transfer.peer) + " sent ";
  if (message.size() < sizeof header)
    throw TransportError(who + "a frame without a header", transfer.peer);
  std::memcpy(&header, message.data(), sizeof header);
  const ConstBytes payload = message.subspan(sizeof header);
  if (header.fingerprint != expected.fingerprint && header.segment == 0)
    throw wrong_size(transfer, transfer.peer);
  expected.length = static_cast<std::uint32_t>(payload.size());
  const bool is_packed = (header.flags & kFramePacked) != 0;
  if (is_packed) expected.flags |= kFramePacked;
  const std::size_t length = is_packed ? codec::unpacked_bytes(payload) : payload.size();
  if (header != expected || length > transfer.size - transfer.moved)
    throw TransportError(who + "a frame that does not fit this recv()", transfer.peer);
  const Bytes to(transfer.data + transfer.moved, length);
  try {
    if (is_packed)
      codec::unpack(payload, to);
    else if (!payload.empty())
      std::memcpy(to.data(), payload.data(), length);
  } catch (const InvalidArgument& error) {
    throw TransportError(who + "a message that can't be decoded: " + error.what(), transfer.peer);
  }
  transfer.moved += length;
  ++transfer.frames;
}

const Transfer* PointToPoint::overdue() const {
  for (const auto* queue : {&sends_, &receives_})
    for (const Transfer& each : *queue)
      if (each.deadline.passed()) return &each;
  return nullptr;
}

std::optional<Wait> PointToPoint::waiting(const IsAwaited& is_awaited) const {
  const Transfer* first = nullptr;
  for (const Transfer& each : sends_)
    if (first == nullptr && is_awaited(each, /*sends=*/true)) first = &each;
  const bool sends = first != nullptr;
  for (const Transfer& each : receives_) {
    const bool better = first == nullptr || first->peer == Transfer::kAnyRank;
    if (better && is_awaited(each, /*sends=*/false)) first = &each;
  }
  if (first == nullptr) return std::nullopt;
  Wait wait;
  wait.activity = sends ? Activity::kSend : Activity::kReceive;
  wait.peer = first->peer;
  wait.reads = sends;
  if (wait.peer >= 0) wait.number = (sends ? sent_ : received_)[at(wait.peer)];
  wait.spec = (sends ? "send of " : "recv of ") + std::to_string(first->size) + " bytes";
  return wait;
}

void PointToPoint::fail(const std::exception_ptr& error) noexcept {
  for (auto* queue : {&sends_, &receives_}) {
    for (Transfer& each : *queue) each.work->finish(error);
    queue->clear();
  }
  own_.clear();
}

}  // namespace gradwire::exec
