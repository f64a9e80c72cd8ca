// The header in front of every frame of a data link. Fixed size, little endian, checked by the
// receiver and never dispatched on: the Plan already knows which frame must come next on each link,
// so a header that differs is an error that names the peer, not a wrong sum.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace gradwire {

inline constexpr std::uint32_t kFrameMagic = 0x31575247;  // "GRW1"; a new wire version, a new magic

enum FrameFlags : std::uint16_t {
  kFrameCollective = 0,
  kFramePointToPoint = 1,
};

struct FrameHeader {
  std::uint32_t magic = kFrameMagic;
  std::uint32_t communicator = 0;  // which communicator of the job
  std::uint32_t operation = 0;     // sequence number of the operation, modulo 2^32
  std::uint32_t fingerprint = 0;   // OpSpec::fingerprint(): both ends mean the same operation
  std::uint32_t segment = 0;       // which instance of the schedule (part of a message, for send)
  std::uint16_t round = 0;
  std::uint16_t flags = 0;     // FrameFlags
  std::uint32_t length = 0;    // payload bytes that follow
  std::uint32_t segments = 0;  // how many frames the message makes: both ends cut it alike

  bool operator==(const FrameHeader&) const = default;
};
static_assert(sizeof(FrameHeader) == 32 && std::is_trivially_copyable_v<FrameHeader>);

// Where nobody says how large the largest frame is. Of several ranks on a host, what a kernel or a
// peer copies is still in a cache then when it is read; smaller ones cost more than they gain. And
// it fits two of the packets that loopback has at most, of 65,483 bytes: a small third one after
// each frame takes a quarter of the time.
inline constexpr std::size_t kUsualFrame = 2046 * 64;

}  // namespace gradwire
