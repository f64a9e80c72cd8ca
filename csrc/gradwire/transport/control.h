// Control: one authenticated socket to every other rank of a communicator, beside the data links.
// It carries little and tells the root cause: who failed and why, who waits for whom, who left in
// peace.
//
// Used by one thread at a time (the engine), but abort-safe sends are not needed: abort() only
// rings. Nothing blocks: a frame that does not fit the socket's buffer is dropped for that peer
// (its owner is not reading and will see the closed socket instead).
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
  kFailure = 1,      // culprit, kind, reason: the sender's communicator is dead
  kBye = 2,          // the sender closed in peace; its silence is no failure
  kWaiting = 3,      // the sender waits for `culprit` in `operation` since `value` milliseconds
  kFingerprint = 4,  // the sender is at `operation` with fingerprint `value`; text = OpSpec
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
struct ControlFrame {
  std::uint32_t magic = 0x31435247;  // "GRC1"
  ControlType type = ControlType::kFailure;
  FailureKind kind = FailureKind::kOther;
  std::int16_t reserved = 0;
  std::int32_t culprit = -1;
  std::uint32_t operation = 0;
  std::uint64_t value = 0;
  std::array<char, 232> text{};  // zero-padded UTF-8, may be cut
};
static_assert(sizeof(ControlFrame) == 256);

// The text of a frame; what does not fit is cut.
void set_text(ControlFrame& frame, std::string_view text) noexcept;
std::string text_of(const ControlFrame& frame);

// What a peer's control socket said; `gone` is its end without a BYE, told once, and then the frame
// is a kFailure of that peer whose text says why.
struct ControlEvent {
  Rank from = -1;
  bool gone = false;
  ControlFrame frame;
};

class Control {
 public:
  Control(Rank rank, int size);

  // Takes over a connected, authenticated stream socket to `peer`; sets keep-alive and
  // TCP_USER_TIMEOUT where it is TCP.
  void adopt(UniqueFd socket, Rank peer);

  void send(Rank peer, const ControlFrame& frame) noexcept;
  void broadcast(const ControlFrame& frame) noexcept;

  // The next event that has arrived, if any; frames of a peer come before its end.
  std::optional<ControlEvent> poll();

  // Closes every socket without a word.
  void let_go() noexcept { links_.clear(); }

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
    bool bye = false;
  };
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
