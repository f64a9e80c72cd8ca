#include "gradwire/transport/control.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>

#include "gradwire/base/error.h"
#include "gradwire/transport/socket.h"
#include "gradwire/transport/ways/tcp_silence.h"
#include "gradwire/transport/ways/ways.h"

namespace gradwire::transport {
namespace {

// How many frames that only inform are sent to a peer before it has read the first of them.
constexpr std::uint32_t kWindow = 64;
constexpr int kPollMilliseconds = 100;
constexpr timespec kLook{0, 250'000'000};  // between two looks at who is silent by all ways
constexpr const char* kNotSealed =
    "libcrypto could not encrypt what it was to be sent (out of memory, or the library is broken)";
constexpr std::uint64_t kMostRanks = std::numeric_limits<Rank>::max();

const char* meaning_of(int error) noexcept {
  const bool silent = error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH;
  return silent ? "its host or the network to it is dead" : "its control connection failed";
}

template <typename Enum>
bool within(Enum value, Enum first, Enum last) {
  return value >= first && value <= last;
}

// Whether the ranks of the job that a frame names are possible.
bool has_valid_job_ranks(const ControlFrame& frame) {
  if (frame.type == ControlType::kFailure) return frame.value <= kMostRanks;
  const bool names_rank =
      frame.type == ControlType::kPosition && (frame.flags & kInOtherCommunicator) != 0;
  return !names_rank || frame.segment < kMostRanks;
}

std::string_view chars_of(const ControlFrame& frame) {
  return {reinterpret_cast<const char*>(&frame), sizeof frame};
}

bool has_room(int socket) {
  pollfd room{socket, POLLOUT, 0};
  return ::poll(&room, 1, 0) == 1;
}

bool is_valid(const ControlFrame& frame, int size) {
  return frame.magic == ControlFrame{}.magic &&
         within(frame.type, ControlType::kFailure, ControlType::kAnswer) &&
         within(frame.kind, FailureKind::kTransport, FailureKind::kOther) &&
         within(frame.culprit, kNoPeer, size - 1) && has_valid_job_ranks(frame);
}

}  // namespace

void set_text(ControlFrame& frame, std::string_view text) noexcept {
  frame.text.fill('\0');
  text.copy(frame.text.data(), frame.text.size());
}

std::string text_of(const ControlFrame& frame) {
  return {frame.text.begin(), std::find(frame.text.begin(), frame.text.end(), '\0')};
}

Control::Control(Rank rank, int size) : rank_(rank), epoll_(make_epoll()), links_(at(size)) {}

void Control::adopt(Connection connection, Rank peer) {
  set_no_delay(connection.socket.get());
  watch(epoll_.get(), connection.socket.get(), EPOLLIN, peer);
  ControlLink& link = link_to(peer);
  Line& line = link.lines.emplace_back();
  line.connection = std::move(connection);
  line.incoming.reserve(sizeof(ControlFrame));
  line.outgoing.reserve(crypto::kRecordExtra + sizeof(ControlFrame));
  if (link.lines.size() > 1) watch_silence();
}

void Control::watch_silence() {
  if (timer_.valid()) return;
  timer_ = UniqueFd(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  const itimerspec spec{kLook, kLook};
  if (!timer_.valid() || ::timerfd_settime(timer_.get(), 0, &spec, nullptr) != 0)
    throw Error(system_message("timerfd", errno));
  watch(epoll_.get(), timer_.get(), EPOLLIN, kNoPeer);
}

// Ends a peer that has been silent by all ways for as long as its host would be dead.
std::optional<ControlEvent> Control::end_silent() {
  std::uint64_t rings = 0;
  if (::read(timer_.get(), &rings, sizeof rings) < 0) return std::nullopt;
  for (std::size_t peer = 0; peer < links_.size(); ++peer) {
    const auto& lines = links_[peer].lines;
    const bool here = !lines.empty() && !links_[peer].released;
    if (!here || lines.front().connection.ways == nullptr) continue;
    take_new_ways(static_cast<Rank>(peer));
    if (std::ranges::all_of(lines, [](const Line& line) {
          const auto found = silence_of(line.socket());
          return found && found->seconds > seconds_to_dead(line.socket());
        }))
      return end(static_cast<Rank>(peer), system_message(meaning_of(ETIMEDOUT), ETIMEDOUT));
  }
  return std::nullopt;
}

// The way's last socket stays: frames may be on it alone. An older one goes.
void Control::take_new_ways(Rank peer) {
  auto& lines = link_to(peer).lines;
  const std::shared_ptr<Ways> ways = lines.front().connection.ways;
  for (int way = 0; way < ways->count(); ++way) {
    std::vector<Connection> made = ways->take(way, kControlPart);
    if (made.size() != 1) continue;
    const auto of_way = [way](const Line& line) { return line.connection.way == way; };
    if (std::ranges::count_if(lines, of_way) > 1) {
      const auto oldest = std::ranges::find_if(lines, of_way);
      unwatch(epoll_.get(), oldest->socket());
      lines.erase(oldest);
    }
    made.front().ways = ways;
    try {
      adopt(std::move(made.front()), peer);
      put_unread_or_end(link_to(peer));
    } catch (const Error&) {
      ways->end(way, ways->generation(way));
    }
  }
}

bool Control::send(Rank peer, ControlFrame frame) noexcept {
  ControlLink& link = links_[at(peer)];
  if (!connected(peer) || link.unsealable) return true;
  if (!may_send(link, frame.type)) return false;
  frame.received = link.read;
  frame.number = link.sent;
  if (!put_frame_or_end(link, frame)) return false;
  link.acked = link.read;
  if (frame.type != ControlType::kAck) ++link.sent;
  return true;
}

// Sends what fits of a frame, and keeps the rest. Returns false where none of it does, which drops
// it. A frame that was sealed can't be dropped while the peer lives, as it would miss its number:
// so it is sealed only where there is room.
bool Control::put_frame(Line& line, const ControlFrame& frame) {
  if (!push_out(line)) return false;
  crypto::Seal* seal = line.connection.seal.get();
  if (seal != nullptr && !has_room(line.socket())) return false;
  if (seal == nullptr)
    line.outgoing = chars_of(frame);
  else
    line.outgoing = seal->records(chars_of(frame));
  const std::size_t whole = line.outgoing.size();
  if (push_out(line) || line.outgoing.size() < whole) return true;
  const bool dropped = seal == nullptr || !would_block(errno);
  if (dropped) line.outgoing.clear();
  return !dropped;
}

// Frames are numbered by their seal, so after one that libcrypto did not seal none can follow. The
// doorbell rings for a socket that is shut down.
bool Control::put_frame_or_end(ControlLink& link, const ControlFrame& frame) noexcept {
  bool sent = false;
  try {
    for (Line& line : link.lines) sent |= put_frame(line, frame);
    const bool by_ways = link.lines.front().connection.ways != nullptr;
    if (sent && by_ways && frame.type != ControlType::kAck) link.unread.push_back(frame);
    return sent;
  } catch (const std::exception&) {
    end_unsealable(link);
    return true;
  }
}

// The peer may read a new socket before the older ones, and takes no frame after a later one.
void Control::put_unread_or_end(ControlLink& link) noexcept {
  try {
    for (const ControlFrame& frame : link.unread) put_frame(link.lines.back(), frame);
  } catch (const std::exception&) {
    end_unsealable(link);
  }
}

void Control::end_unsealable(ControlLink& link) noexcept {
  link.unsealable = true;
  for (Line& line : link.lines) {
    line.outgoing.clear();
    ::shutdown(line.socket(), SHUT_RDWR);
  }
}

bool Control::may_send(const ControlLink& link, ControlType type) noexcept {
  const bool last_word = type == ControlType::kFailure || type == ControlType::kBye;
  return last_word || type == ControlType::kAck || link.sent - link.peer_acked < kWindow;
}

// Acknowledges a peer's frames. A peer that gets no other frames from this rank must still learn
// that its own were read, since it sends no more than kWindow unread ones.
void Control::acknowledge(Rank peer) noexcept {
  if (link_to(peer).read - link_to(peer).acked >= kWindow / 2) ring(peer);
}

// Where there is no room for it, the peer has not read what woke it before.
void Control::ring(Rank peer) noexcept {
  ControlFrame frame;
  frame.type = ControlType::kAck;
  send(peer, frame);
}

bool Control::push_out(Line& line) {
  if (line.outgoing.empty()) return true;
  const ssize_t sent = ::send(line.socket(), line.outgoing.data(), line.outgoing.size(),
                              MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent > 0) line.outgoing.erase(0, static_cast<std::size_t>(sent));
  return line.outgoing.empty();
}

bool Control::broadcast(const ControlFrame& frame) noexcept {
  bool all = true;
  for (std::size_t peer = 0; peer < links_.size(); ++peer)
    all = send(static_cast<Rank>(peer), frame) && all;
  return all;
}

std::optional<ControlEvent> Control::poll() {
  epoll_event ready{};
  while (::epoll_wait(epoll_.get(), &ready, 1, 0) == 1)
    if (auto event = ready.data.fd == kNoPeer ? end_silent() : read(ready.data.fd)) return event;
  return std::nullopt;
}

std::optional<ControlEvent> Control::read(Rank peer) {
  ControlLink& link = link_to(peer);
  for (std::size_t line = link.lines.size(); line-- > 0 && line < link.lines.size();)
    if (auto event = read(peer, link.lines[line])) return event;
  return std::nullopt;
}

std::optional<ControlEvent> Control::read(Rank peer, Line& line) {
  ControlLink& link = link_to(peer);
  if (link.unsealable) return end(peer, kNotSealed);
  crypto::Seal* seal = line.connection.seal.get();
  std::array<char, crypto::kRecordExtra + crypto::kMostRecord> bytes;
  // No more than a frame: what follows it may be for this socket's next owner.
  const std::size_t wanted =
      seal == nullptr ? sizeof(ControlFrame) - line.incoming.size() : seal->missing();
  const ssize_t got = ::recv(line.socket(), bytes.data(), wanted, MSG_DONTWAIT);
  if (got < 0 && would_block(errno)) return std::nullopt;
  if (got < 0) return end_line(peer, line, system_message(meaning_of(errno), errno));
  if (got == 0) return end_line(peer, line, "it closed its control connection or died");
  const std::string why = open(line, {bytes.data(), static_cast<std::size_t>(got)});
  if (!why.empty()) return end(peer, why);
  if (line.incoming.starts_with(kReleasedMagic)) {
    link.released = true;
    return end(peer, "it goes on without this communicator");
  }
  return line.incoming.size() < sizeof(ControlFrame) ? std::nullopt : take_frame(peer, line);
}

// The end of a socket is the peer's end where it is the last one.
std::optional<ControlEvent> Control::end_line(Rank peer, Line& line, const std::string& reason) {
  auto& lines = link_to(peer).lines;
  const auto number = &line - lines.data();
  const Connection& of = line.connection;
  if (of.ways != nullptr) of.ways->end(of.way, of.generation);
  if (of.ways != nullptr && lines.size() == 1) take_new_ways(peer);
  if (lines.size() == 1) return end(peer, reason);
  unwatch(epoll_.get(), (lines.begin() + number)->socket());
  lines.erase(lines.begin() + number);
  return std::nullopt;
}

// Adds what has arrived to the next frame. Returns why it can't be opened; empty where it can.
std::string Control::open(Line& line, std::string_view arrived) try {
  crypto::Seal* seal = line.connection.seal.get();
  if (seal == nullptr) {
    line.incoming += arrived;
    return {};
  }
  const auto opened = seal->opened(arrived);
  if (!opened) return crypto::kChanged;
  line.incoming += *opened;
  return {};
} catch (const Error& error) {
  return error.what();
}

std::optional<ControlEvent> Control::take_frame(Rank peer, Line& line) {
  ControlLink& link = link_to(peer);
  ControlEvent event{peer, false, {}};
  const bool whole = line.incoming.size() == sizeof event.frame;
  std::memcpy(&event.frame, line.incoming.data(), sizeof event.frame);
  line.incoming.clear();
  if (!whole || !is_valid(event.frame, static_cast<int>(links_.size())))
    return end(peer, "it sent bytes that are no control frame");
  // What came by another way before may be newer.
  if (static_cast<std::int32_t>(event.frame.received - link.peer_acked) > 0)
    link.peer_acked = event.frame.received;
  const auto is_read = [&](const ControlFrame& frame) {
    return static_cast<std::int32_t>(frame.number - link.peer_acked) < 0;
  };
  while (!link.unread.empty() && is_read(link.unread.front())) link.unread.pop_front();
  if (event.frame.type == ControlType::kAck) return std::nullopt;
  if (line.connection.ways == nullptr) {
    ++link.read;
  } else {
    if (static_cast<std::int32_t>(event.frame.number - link.read) < 0) return std::nullopt;
    link.read = event.frame.number + 1;
  }
  acknowledge(peer);
  if (event.frame.type == ControlType::kBye) link.bye = true;
  return event;
}

// Returns whether the socket took the rest of a frame that is partly sent.
bool Control::finish_frame(Line& line, const Deadline& deadline) {
  while (!push_out(line)) {
    pollfd room{line.socket(), POLLOUT, 0};
    const int ready = ::poll(&room, 1, deadline.milliseconds_left(kPollMilliseconds));
    if (ready < 0 || (room.revents & (POLLERR | POLLHUP)) != 0 || deadline.passed()) return false;
  }
  return true;
}

std::vector<Released> Control::release(Rank peer, double timeout) {
  ControlLink& link = link_to(peer);
  std::vector<Released> released;
  const Deadline deadline = Deadline::after(timeout);
  for (Line& line : link.lines) {
    if (link.unsealable || !finish_frame(line, deadline)) continue;
    unwatch(epoll_.get(), line.socket());
    released.push_back({std::move(line.connection), std::move(line.incoming)});
  }
  link.lines.clear();
  return released;
}

std::optional<ControlEvent> Control::end(Rank peer, const std::string& reason) {
  ControlLink& link = link_to(peer);
  for (const Line& line : link.lines) unwatch(epoll_.get(), line.socket());
  if (!link.lines.empty() && link.lines.front().connection.ways != nullptr)
    link.lines.front().connection.ways->finish();
  ++ended_;
  if (!link.released) link.lines.clear();
  if (link.bye) return std::nullopt;
  ControlEvent event{peer, true, {}};
  event.frame.kind = FailureKind::kTransport;
  event.frame.culprit = peer;
  set_text(event.frame, "rank " + std::to_string(rank_) + ": rank " + std::to_string(peer) +
                            " is gone: " + reason);
  return event;
}

}  // namespace gradwire::transport
