// Control: one authenticated socket to every other rank of a communicator, beside the data links.
// It carries little and tells the root cause: who failed and why, who waits for whom, who closed
// cleanly.
//
// One thread at a time uses it, the communicator's driver. Nothing blocks. A peer that computes may
// not read for long: it is sent a few frames that only inform, then none, so that the final ones
// (kFailure, kBye) always fit, and TCP never takes its closed window for a dead host.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gradwire/base/fd.h"
#include "gradwire/base/types.h"

namespace gradwire::transport {

enum class ControlType : std::uint8_t {
  kFailure = 1,   // culprit, kind, reason: the sender's communicator is dead
  kBye = 2,       // the sender closed cleanly; its silence is no failure
  kPosition = 3,  // where the sender is: in its last call, or out of it; what it waits for there
  kAck = 4,       // only `received`, when no other frame has carried it for long
  kInquiry = 5,   // ranks differ in call `value` or before it: what did you call?
  kAnswer = 6,    // ... one of the calls before it, or, kLast, the last of all
};

enum ControlFlags : std::uint32_t {
  kInCall = 1,  // kPosition: the last call is still in flight
  kAsks = 2,    // kPosition: the receiver is to answer with its own position
  kLast = 4,    // kAnswer: there are no more
};

// What kind of error a failure is, so that every rank raises the same type.
enum class FailureKind : std::uint8_t {
  kTransport = 1,
  kTimeout = 2,
  kAborted = 3,
  kInvalidArgument = 4,
  kOther = 5,
};

// One frame, the same size always; foreign bytes: type, kind and culprit are checked on arrival.
// Every frame but kFailure and kAck describes the sender's calls.
struct ControlFrame {
  std::uint32_t magic = 0x32435247;  // "GRC2"
  ControlType type = ControlType::kFailure;
  FailureKind kind = FailureKind::kOther;
  std::uint16_t round = 0;        // of what the sender waits for
  std::int32_t culprit = -1;      // who failed; kPosition: for whom the sender waits, kNoPeer: none
  std::uint32_t calls = 0;        // how many collectives the sender has begun, modulo 2^32
  std::uint32_t fingerprint = 0;  // of the last of them, which is number calls - 1
  std::uint32_t segment = 0;      // as round
  std::uint64_t digest = 0;       // of the fingerprints of all calls
  std::uint64_t value = 0;        // kPosition: milliseconds since it waits
  std::uint32_t received = 0;     // how many of the receiver's frames the sender has read
  std::uint32_t flags = 0;        // ControlFlags
  std::array<char, 464> text{};   // zero-padded UTF-8, may be cut: the reason; or the last call
};
static_assert(sizeof(ControlFrame) == 512);

// The text of a frame; what does not fit is cut.
void set_text(ControlFrame& frame, std::string_view text) noexcept;
std::string text_of(const ControlFrame& frame);

// A frame from a peer, or the end of its socket without a BYE (`gone`), which is reported once; the
// frame is then a kFailure of that peer whose text says why.
struct ControlEvent {
  Rank from = -1;
  bool gone = false;
  ControlFrame frame;
};

// A socket that was given away, and what was read of its next frame.
struct Released {
  UniqueFd socket;
  std::string received;
};

class Control {
 public:
  Control(Rank rank, int size);

  // Takes over a connected, authenticated stream socket to `peer`. Over TCP it must end when the
  // peer's host is dead: keep-alive and TCP_USER_TIMEOUT are set (`_bootstrap/keepalive.py`).
  void adopt(UniqueFd socket, Rank peer);

  // False where a peer that is there reads too slowly for it: then it is dropped.
  bool send(Rank peer, ControlFrame frame) noexcept;
  bool broadcast(const ControlFrame& frame) noexcept;  // to all; false where one was not told

  // The next event that has arrived, if any; frames of a peer come before its end.
  std::optional<ControlEvent> poll();

  // Gives up a peer's socket, with no frame begun on it but not finished; nullopt where there is
  // none left or the frame can't be finished in time.
  std::optional<Released> release(Rank peer, double timeout);
  // Closes every socket without a BYE.
  void close_all() noexcept {
    links_.clear();
    epoll_.reset();
  }

  // Readable when poll() may return something (level-triggered).
  int doorbell() const noexcept { return epoll_.get(); }

  bool said_bye(Rank peer) const { return links_.at(static_cast<std::size_t>(peer)).bye; }
  bool connected(Rank peer) const {
    return links_.at(static_cast<std::size_t>(peer)).socket.valid();
  }

 private:
  struct Link {
    UniqueFd socket;
    std::array<char, sizeof(ControlFrame)> incoming{};
    std::size_t received = 0;
    std::array<char, sizeof(ControlFrame)> outgoing{};
    std::size_t unsent = 0;  // the last bytes of `outgoing`: a started frame must be finished
    std::uint32_t sent = 0, read = 0;         // frames, without kAck
    std::uint32_t peer_acked = 0, acked = 0;  // of `sent`, by the peer; of `read`, by this rank
    bool bye = false;
  };
  static bool may_send(const Link& link, ControlType type) noexcept;
  void acknowledge(Rank peer) noexcept;
  Link& at(Rank peer) { return links_.at(static_cast<std::size_t>(peer)); }
  static bool push_out(Link& link) noexcept;
  std::optional<ControlEvent> read(Rank peer);
  std::optional<ControlEvent> take_frame(Rank peer);
  std::optional<ControlEvent> end(Rank peer, const std::string& reason);

  Rank rank_;
  UniqueFd epoll_;
  std::vector<Link> links_;
};

}  // namespace gradwire::transport
