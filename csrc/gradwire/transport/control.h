// Control: an authenticated socket to every other rank of a communicator, beside the data links.
// Where two ranks have several ways to each other there is one for each way: a frame is sent by all
// of them, and the receiver takes the first that comes. Such sockets outlive an outage of their
// way; the peer is gone when all have been silent for as long as a dead host may be.
// It carries few bytes, from which ranks learn the root cause of a failure: who failed and why, who
// waits for whom, who closed cleanly.
//
// One thread at a time uses it: the communicator's driver. No call blocks, except release(). A peer
// that computes may read nothing for long. Such a peer is sent at most 64 unread frames that only
// inform, so that the final ones (kFailure, kBye) always fit, and TCP does not take its closed
// window for a dead host.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gradwire/base/types.h"
#include "gradwire/transport/connection.h"
#include "gradwire/transport/transport.h"

namespace gradwire::transport {

enum class ControlType : std::uint8_t {
  kFailure = 1,   // culprit, kind, reason: the sender's communicator is dead
  kBye = 2,       // the sender closed cleanly; its silence is no failure
  kPosition = 3,  // whether the sender is in its last call, and what it waits for there
  kAck = 4,       // carries only `received`, where no other frame has carried it for long
  kInquiry = 5,   // asks for the receiver's calls: ranks differ in call `value` or before it
  kAnswer = 6,    // one of these calls; with kLast, the last of them
};

enum ControlFlags : std::uint32_t {
  kInCall = 1,  // kPosition: the last call is still in flight
  kAsks = 2,    // kPosition: the receiver is to answer with its own position
  kLast = 4,    // kAnswer: no more follow
  // kFailure, kBye: a program ended this communicator, and goes on with its others
  kOnlyThisCommunicator = 8,
  kInOtherCommunicator = 16,  // kPosition: the sender waits in another communicator
};

// What kind of error a failure is, so that every rank raises the same type.
enum class FailureKind : std::uint8_t {
  kTransport = 1,
  kTimeout = 2,
  kAborted = 3,
  kInvalidArgument = 4,
  kOther = 5,
};

// What one control message carries; all have the same size. It is not trusted: type, kind and ranks
// are checked on arrival. Every frame but kFailure and kAck describes the sender's calls.
struct ControlFrame {
  std::uint32_t magic = 0x32435247;  // "GRC2"
  ControlType type = ControlType::kFailure;
  FailureKind kind = FailureKind::kOther;
  std::uint16_t round = 0;        // the round that the sender waits for
  std::int32_t culprit = -1;      // who failed; kPosition: for whom the sender waits, kNoPeer: none
  std::uint32_t calls = 0;        // how many collectives the sender has begun, modulo 2^32
  std::uint32_t fingerprint = 0;  // of the last of them, which is number calls - 1
  // The segment that the sender waits for. With kInOtherCommunicator: the rank of the job that it
  // waits for, perhaps over others.
  std::uint32_t segment = 0;
  std::uint64_t digest = 0;  // of the fingerprints of all calls
  // kPosition: how long it has waited, in milliseconds. kFailure: the culprit's rank in the job and
  // 1, or 0 where it is not known.
  std::uint64_t value = 0;
  std::uint32_t received = 0;    // how many of the receiver's frames the sender has read
  std::uint32_t flags = 0;       // ControlFlags
  std::uint32_t number = 0;      // how many frames the sender has sent before, without kAck
  std::array<char, 460> text{};  // zero-padded UTF-8, may be cut: the reason; or the last call
};
static_assert(sizeof(ControlFrame) == 512);

// The first bytes of what a peer sends once it has released its end
// (`_bootstrap/survivor_links.py`).
constexpr std::string_view kReleasedMagic = "GRS2";

// Set and return the text of a frame. Text that does not fit is cut.
void set_text(ControlFrame& frame, std::string_view text) noexcept;
std::string text_of(const ControlFrame& frame);

// A frame from a peer; or, reported once, that its socket ended without a BYE (`gone`): then the
// frame is a kFailure that names this peer as culprit, and its text says why.
struct ControlEvent {
  Rank from = -1;
  bool gone = false;
  ControlFrame frame;
};

// A socket that was released, and the decrypted bytes that were already read of its next frame.
struct Released {
  Connection connection;
  std::string received;
};

class Control final : public Bells {
 public:
  Control(Rank rank, int size);

  // Takes over a connected, authenticated stream socket to `peer`; called again for each further
  // way. Over TCP the only socket must end when the peer's host is dead: keep-alive and
  // TCP_USER_TIMEOUT are set (`_host/keepalive.py`). One of several must not.
  void adopt(Connection connection, Rank peer);

  // Sends a frame. Returns false, and drops the frame, where a live peer reads too slowly for it.
  // Where it can't be encrypted, the peer's end comes with the next poll().
  bool send(Rank peer, ControlFrame frame) noexcept;
  bool broadcast(const ControlFrame& frame) noexcept;  // to all peers; false if one was dropped

  // Wakes a peer that sleeps on its doorbell(), by sending an acknowledgement.
  void ring(Rank peer) noexcept override;

  // Returns the next event that has arrived, if any. A peer's frames come before its end.
  std::optional<ControlEvent> poll();

  // Releases a peer's sockets, one for each way that has not ended, with no frame partly sent on
  // them: without those where the frame can't be finished in time. A peer that has released its own
  // end may have sent other bytes than frames by then: they count as its end, and stay for the
  // owner.
  std::vector<Released> release(Rank peer, double timeout);
  // Closes every socket without a BYE.
  void close_all() noexcept {
    links_.clear();
    epoll_.reset();
  }

  // Returns a descriptor that is readable when poll() may return something (level-triggered).
  int doorbell() const noexcept { return epoll_.get(); }

  // Returns how many peers' sockets have ended so far.
  int ended() const noexcept { return ended_; }
  bool said_bye(Rank peer) const { return links_.at(at(peer)).bye; }
  bool connected(Rank peer) const {
    const ControlLink& link = links_.at(at(peer));
    return !link.lines.empty() && !link.released;
  }

 private:
  struct Line {
    int socket() const noexcept { return connection.socket.get(); }

    Connection connection;
    std::string incoming;  // received bytes of the next frame
    std::string outgoing;  // unsent bytes of a frame that is partly sent
  };
  struct ControlLink {
    std::vector<Line> lines;                  // by way, those that have not ended
    std::uint32_t sent = 0, read = 0;         // frames, without kAck
    std::uint32_t peer_acked = 0, acked = 0;  // of `sent`, by the peer; of `read`, by this rank
    std::deque<ControlFrame> unread;  // sent, not acknowledged; where there are several ways
    bool bye = false;
    bool released = false;    // the peer released its end: further bytes are for the next owner
    bool unsealable = false;  // libcrypto failed to encrypt: nothing more may be sent
  };
  static bool may_send(const ControlLink& link, ControlType type) noexcept;
  void acknowledge(Rank peer) noexcept;
  ControlLink& link_to(Rank peer) { return links_.at(at(peer)); }
  static bool push_out(Line& line);
  static bool finish_frame(Line& line, const Deadline& deadline);
  static bool put_frame(Line& line, const ControlFrame& frame);
  static bool put_frame_or_end(ControlLink& link, const ControlFrame& frame) noexcept;
  static void put_unread_or_end(ControlLink& link) noexcept;
  static void end_unsealable(ControlLink& link) noexcept;
  void watch_silence();
  void take_new_ways(Rank peer);
  std::optional<ControlEvent> end_silent();
  static std::string open(Line& line, std::string_view arrived);
  std::optional<ControlEvent> read(Rank peer);
  std::optional<ControlEvent> read(Rank peer, Line& line);
  std::optional<ControlEvent> end_line(Rank peer, Line& line, const std::string& reason);
  std::optional<ControlEvent> take_frame(Rank peer, Line& line);
  std::optional<ControlEvent> end(Rank peer, const std::string& reason);

  Rank rank_;
  UniqueFd epoll_;
  UniqueFd timer_;  // rings where there are peers of several ways
  std::vector<ControlLink> links_;
  int ended_ = 0;
};

}  // namespace gradwire::transport
