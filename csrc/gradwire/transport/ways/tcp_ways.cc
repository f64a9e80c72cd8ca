#include "gradwire/transport/ways/tcp_ways.h"

#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <span>

#include "gradwire/base/error.h"

namespace gradwire::transport {
namespace {

using std::chrono::milliseconds;

// After which the state of a way is told: a peer that ends does so on all ways at once.
constexpr milliseconds kTell{200};
// For how long a frame is missing before the peer is asked for it, and how long before that it must
// have been sent: kernels on the way acknowledge what they have, not what has arrived.
constexpr milliseconds kMissing{3000};
constexpr milliseconds kSentBefore{2500};
constexpr const char* kForeign = "it acknowledged a frame that it was not sent";
constexpr const char* kTooMuch = "it sent more frames than it may before they are acknowledged";

// Whether bytes of a socket may yet come to the peer's host. Those of a reset one do not.
bool has_unacknowledged(int socket) noexcept {
  int bytes = 0;
  pollfd reset{socket, 0, 0};
  return ::poll(&reset, 1, 0) == 0 && ::ioctl(socket, SIOCOUTQ, &bytes) == 0 && bytes > 0;
}

}  // namespace

TcpWays::TcpWays(std::shared_ptr<Ways> ways, std::size_t max_message)
    : all_(std::move(ways)), max_message_(max_message), ways_(at(all_->count())) {}

TcpWays::~TcpWays() {
  for (int way = 0; way < all_->count(); ++way) all_->use_again(way, this, /*silently=*/true);
}

// ---- Ways --------------------------------------------------------------------------------------

bool TcpWays::all_ended() const noexcept {
  return std::ranges::all_of(ways_, [](const Way& way) { return way.state == State::kEnded; });
}

void TcpWays::leave_out(int number, State state, const std::string& why) {
  Way& way = ways_[at(number)];
  if (way.state == State::kEnded || way.state == state) return;
  if (way.state == State::kUsed) {
    way.since = Clock::now();
    way.why = why;
  }
  way.state = state;
  if (state == State::kEnded) all_->end(number, way.generation);
  for (std::uint32_t i = 0; i < kept_.size(); ++i)
    if (kept_[i].way == number) send_again(first_ + i);
  changed_ = true;
}

void TcpWays::use_again(int number) {
  Way& way = ways_[at(number)];
  if (way.state != State::kLeftOut || !way.answered) return;
  way.state = State::kUsed;
  if (std::exchange(way.told, false)) all_->use_again(number, this);
  changed_ = true;
}

void TcpWays::renew(int number, std::uint32_t generation) {
  leave_out(number, State::kEnded, {});  // no news where it works
  Way& way = ways_[at(number)];
  way.state = State::kLeftOut;
  way.generation = generation;
  way.answered = false;
  way.acks = {};
  way.data.clear();
}

void TcpWays::tell(Clock::time_point now) {
  for (int number = 0; number < all_->count(); ++number) {
    Way& way = ways_[at(number)];
    if (way.state == State::kUsed || way.told || way.why.empty()) continue;
    if (now - way.since < kTell) continue;
    way.told = true;
    all_->leave_out(number, this, way.why);
  }
}

bool TcpWays::others_usable(int than) const noexcept {
  for (int way = 0; way < all_->count(); ++way)
    if (way != than && usable(way)) return true;
  return false;
}

bool TcpWays::in_flight(int way) const noexcept {
  return std::ranges::any_of(ways_[at(way)].data, has_unacknowledged);
}

bool TcpWays::delivered() const noexcept {
  if (to_send_again() > 0) return false;
  for (int way = 0; way < all_->count(); ++way)
    if (usable(way) && in_flight(way)) return false;
  return true;
}

TcpWays::Clock::time_point TcpWays::unusable_since(Clock::time_point now) noexcept {
  const bool any =
      std::ranges::any_of(ways_, [](const Way& way) { return way.state == State::kUsed; });
  if (any) unusable_.reset();
  if (!any && !unusable_) unusable_ = now;
  return unusable_.value_or(now);
}

// ---- Sending -----------------------------------------------------------------------------------

std::uint32_t TcpWays::keep(ConstBytes frame) {
  const std::uint32_t number = first_ + static_cast<std::uint32_t>(kept_.size());
  Kept& made = kept_.emplace_back();
  made.frame = buffer(frame.size());
  made.bytes = frame.size();
  kept_bytes_ += room_for(made.bytes);
  std::byte* out = made.frame.data() + kFrameAt;
  std::memcpy(out, frame.data(), frame.size());
  Prefix prefix;
  std::memcpy(&prefix, out, sizeof prefix);
  prefix = Prefix(prefix.length, number);
  std::memcpy(out, &prefix, sizeof prefix);
  return number;
}

void TcpWays::send_again(std::uint32_t number) {
  if (std::exchange(kept(number).again, true)) return;
  again_.push_back(number);
}

std::optional<std::uint32_t> TcpWays::next_again() noexcept {
  while (!again_.empty()) {
    const std::uint32_t number = again_.front();
    again_.pop_front();
    if (number - first_ >= kept_.size()) continue;  // acknowledged meanwhile
    kept(number).again = false;
    return number;
  }
  return std::nullopt;
}

std::size_t TcpWays::to_send_again() const noexcept {
  const bool over =
      std::ranges::all_of(ways_, [](const Way& way) { return way.state == State::kEnded; });
  return over ? 0 : again_.size();
}

ConstBytes TcpWays::send_by(std::uint32_t number, int way) {
  Kept& frame = kept(number);
  frame.way = way;
  frame.sent = Clock::now();
  return {frame.frame.data() + kFrameAt, frame.bytes};
}

void TcpWays::free_until(std::uint32_t next) {
  if (next == first_) return;
  for (; first_ != next; ++first_) {
    kept_bytes_ -= room_for(kept_.front().bytes);
    give_back(std::move(kept_.front().frame), kept_.front().bytes);
    kept_.pop_front();
  }
  changed_ = true;
}

// ---- Receiving ---------------------------------------------------------------------------------

bool TcpWays::has(std::uint32_t number) const noexcept {
  return static_cast<std::int32_t>(number - read_) < 0 || early_.contains(number);
}

void TcpWays::set_aside(std::uint32_t number, ConstBytes payload) {
  if (early_bytes_ > kMostKeptBytes + max_message_) throw Error(kTooMuch);
  Early& made = early_[number];
  made.payload = buffer(payload.size());
  made.bytes = payload.size();
  early_bytes_ += room_for(made.bytes);
  std::memcpy(made.payload.data(), payload.data(), payload.size());
}

std::optional<ConstBytes> TcpWays::set_aside_before() noexcept {
  const auto found = early_.find(read_);
  if (found == early_.end()) return std::nullopt;
  return ConstBytes(found->second.payload.data(), found->second.bytes);
}

void TcpWays::consume() noexcept {
  if (const auto found = early_.find(read_++); found != early_.end()) {
    early_bytes_ -= room_for(found->second.bytes);
    give_back(std::move(found->second.payload), found->second.bytes);
    early_.erase(found);
  }
}

bool TcpWays::misses_one(Clock::time_point now) noexcept {
  const bool missing = !early_.empty() && !early_.contains(read_);
  if (!missing || missed_ != read_ || !misses_) misses_ = now;
  missed_ = read_;
  if (!missing || drained_ - *misses_ < kMissing) return false;
  misses_ = now;  // and asks once more after as long
  return true;
}

// Buffers of large frames are used again: freshly allocated memory of this size costs page faults.
std::size_t TcpWays::room_for(std::size_t bytes) const noexcept {
  return bytes > max_message_ / 2 ? max_message_ : bytes;
}

AlignedBuffer TcpWays::buffer(std::size_t bytes) {
  const std::size_t room = room_for(bytes);
  if (spare_.empty() || room < max_message_) return frame_buffer(room);
  AlignedBuffer found = std::move(spare_.back());
  spare_.pop_back();
  return found;
}

void TcpWays::give_back(AlignedBuffer spare, std::size_t bytes) {
  if (room_for(bytes) == max_message_) spare_.push_back(std::move(spare));
}

// ---- Acknowledgements --------------------------------------------------------------------------

void TcpWays::acknowledge(bool missing) {
  told_ = read_;
  Acknowledgement said{.next = read_, .missing = missing ? 1U : 0U};
  for (std::size_t way = 0; way < ways_.size(); ++way)
    said.ended[way] = ways_[way].generation + (ways_[way].state == State::kEnded ? 1 : 0);
  for (Way& way : ways_)
    if (way.state != State::kEnded) send(way.acks, said);
}

// Where a socket has no room, the peer has not read what was said before; later words replace this.
void TcpWays::send(AckSocket& socket, const Acknowledgement& said) {
  push_out(socket);
  if (!socket.unsent.empty()) return;
  const std::string_view plain(reinterpret_cast<const char*>(&said), sizeof said);
  if (socket.wire.seal == nullptr)
    socket.unsent = plain;
  else
    socket.unsent = socket.wire.seal->records(plain);
  push_out(socket);
}

// That a socket has failed shows when it is read.
void TcpWays::push_out(AckSocket& socket) noexcept {
  if (socket.unsent.empty()) return;
  const ssize_t sent = ::send(socket.wire.socket, socket.unsent.data(), socket.unsent.size(),
                              MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent > 0) socket.unsent.erase(0, static_cast<std::size_t>(sent));
}

void TcpWays::hear(Clock::time_point now) {
  for (int number = 0; number < all_->count(); ++number) {
    const Way& way = ways_[at(number)];
    if (way.state != State::kEnded) push_out(ways_[at(number)].acks);
    while (way.state != State::kEnded && receive(number, now)) continue;
  }
}

// Returns whether something came.
bool TcpWays::receive(int way, Clock::time_point now) {
  AckSocket& socket = ways_[at(way)].acks;
  std::array<char, 1024> bytes;
  const ssize_t got = ::recv(socket.wire.socket, bytes.data(), bytes.size(), MSG_DONTWAIT);
  if (got < 0 && would_block(errno)) return false;
  if (got <= 0) {
    leave_out(way, State::kEnded, got < 0 ? system_message("it failed", errno) : "it was closed");
    return false;
  }
  ways_[at(way)].answered = true;
  const std::string_view arrived(bytes.data(), static_cast<std::size_t>(got));
  if (socket.wire.seal == nullptr) {
    socket.heard += arrived;
  } else {
    const auto opened = socket.wire.seal->opened(arrived);
    if (!opened) throw Error(crypto::kChanged);
    socket.heard += *opened;
  }
  take_all(socket, now);
  return true;
}

void TcpWays::take_all(AckSocket& socket, Clock::time_point now) {
  Acknowledgement heard;
  std::size_t done = 0;
  for (; socket.heard.size() - done >= sizeof heard; done += sizeof heard) {
    std::memcpy(&heard, socket.heard.data() + done, sizeof heard);
    take(heard, now);
  }
  socket.heard.erase(0, done);
}

// What came by a slower way may be older than what is known.
void TcpWays::take(const Acknowledgement& heard, Clock::time_point now) {
  const auto ahead = static_cast<std::int32_t>(heard.next - first_);
  const std::span none = std::span(heard.ended).subspan(ways_.size());
  if (ahead > static_cast<std::int32_t>(kept_.size()) || heard.missing > 1 ||
      std::ranges::any_of(none, [](std::uint32_t ended) { return ended != 0; }))
    throw Error(kForeign);
  if (ahead < 0) return;
  free_until(heard.next);
  for (int way = 0; way < all_->count(); ++way)
    if (heard.ended[at(way)] > ways_[at(way)].generation)
      leave_out(way, State::kEnded, "the peer says that it has ended there");
  if (heard.missing == 0 || kept_.empty()) return;
  const Kept& frame = kept_.front();
  if (frame.way < 0 || frame.again || now - frame.sent < kSentBefore) return;
  // The way may be slow, or the last one. It has lost the frame where the peer's host has it all.
  if (others_usable(frame.way) && !in_flight(frame.way))
    return leave_out(frame.way, State::kEnded, "what was sent does not arrive");
  send_again(first_);
  changed_ = true;
}

}  // namespace gradwire::transport
