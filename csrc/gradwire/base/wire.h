// The header in front of every frame of a data link: of fixed size, little endian. The receiver
// checks it and never dispatches on it: its Plan says which frame comes next on each link, and a
// header that differs is an error that names the peer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace gradwire {

inline constexpr std::uint32_t kFrameMagic = 0x31575247;  // "GRW1"; a new version, a new magic

enum FrameFlags : std::uint16_t {
  kFrameCollective = 0,
  kFramePointToPoint = 1,
  // Beside kFrameCollective: before it began this operation, a rank asked all ranks to stop, or to
  // form the next communicator, because a process wants to join.
  kFrameStop = 2,
  kFrameResize = 4,
  kFramePacked = 8,  // the payload is that of the plan, packed (codec/lossless.h)
};
inline constexpr std::uint16_t kFrameRequests = kFrameStop | kFrameResize;

struct FrameHeader {
  std::uint32_t magic = kFrameMagic;
  std::uint32_t communicator = 0;  // which communicator of the job
  std::uint32_t operation = 0;     // sequence number of the operation, modulo 2^32
  std::uint32_t fingerprint = 0;   // OpSpec::fingerprint() of the operation
  std::uint32_t segment = 0;       // the segment of the call; for send, which frame of the message
  std::uint16_t round = 0;
  std::uint16_t flags = 0;     // FrameFlags
  std::uint32_t length = 0;    // payload bytes that follow
  std::uint32_t segments = 0;  // frames of the message, the same at both ends

  bool operator==(const FrameHeader&) const = default;
};
static_assert(sizeof(FrameHeader) == 32 && std::is_trivially_copyable_v<FrameHeader>);

// The largest frame unless the caller sets another. With several ranks on a host, what the kernel
// or a peer copies is then still in a cache when it is read; smaller frames cost more than they
// gain. It also fits into two loopback packets, of 65,483 bytes at most: a small third packet after
// each frame would take a quarter of the time.
inline constexpr std::size_t kUsualFrame = 2046 * 64;

}  // namespace gradwire
