// The header in front of every frame between a client and a shard of the parameter server, and its
// parser. Bytes from the network are untrusted until parse() has returned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "gradwire/base/types.h"
#include "gradwire/base/wire.h"

namespace gradwire::serve {

inline constexpr std::uint32_t kMessageMagic = 0x31535247;  // "GRS1"; a new version, a new magic

enum class Op : std::uint8_t {
  kJoin = 1,  // a ParameterTable's text, in one or more frames; reply: version, or refused with the
              // reason
  kSet,       // initial values in float32; the first complete ones win; reply: version, or refused
  kPush,      // a gradient; reply: version, `extra` is the staleness; or refused with the reason
  kPull,      // replies: the parameters, a frame at a time
  kWait,      // reply: once the shard's version is at least the one in the header
  kStats,     // reply: JSON
  kSnapshot,  // reply: once the snapshot is written, or refused with the reason
  kAsk,       // Commands to vectors; reply: their Results, or refused with the reason
  kBye,       // the client leaves; no reply
};

enum MessageFlags : std::uint8_t {
  kFirst = 1,    // the first frame of a request or reply
  kLast = 2,     // its last
  kReply = 4,    // from the server
  kRefused = 8,  // of a reply: not done; the payload says why
};

// Returns the flags of a frame: kFirst and kLast as it is the first or last of `frames`.
constexpr std::uint8_t flags_of(std::size_t frame, std::size_t frames) noexcept {
  return static_cast<std::uint8_t>((frame == 0 ? kFirst : 0) | (frame + 1 == frames ? kLast : 0));
}

// Why a request was refused.
enum class Refusal : std::uint32_t { kNone, kInvalid, kStale, kNotFinite, kNoValues, kHasValues };

// In place of a codec's index, in PUSH: the payload begins with one byte for each span of the
// frame, the index of that span's codec.
inline constexpr std::uint16_t kMixedCodecs = 0xFFFF;

// Replicas push and pull values. Coordinators give commands to vectors, and never see a value.
enum class ClientRole : std::uint64_t { kReplica, kCoordinator };

// The version before initial values are there.
inline constexpr std::uint64_t kNoVersion = ~std::uint64_t{0};

// A client: its identity, and in the low 16 bits its incarnation, of which a later one is greater.
using ClientId = std::uint64_t;
constexpr std::uint64_t identity_of(ClientId id) noexcept { return id >> 16; }

struct MessageHeader {
  std::uint32_t magic = kMessageMagic;
  Op op = Op::kBye;
  std::uint8_t flags = kFirst | kLast;
  std::uint16_t codec = 0;     // of the payload: its index in the table, or kMixedCodecs
  ClientId client = 0;         // who asks
  std::uint32_t sequence = 0;  // of the request, which the reply repeats
  std::uint16_t table = 0;     // low bits of the ParameterTable's digest; 0 in JOIN
  std::uint16_t zero = 0;
  // SET, PUSH, replies to PULL: the shard's elements [first, first + count) are in the payload.
  // JOIN: `first` is a ClientRole. Refusals: `count` is a Refusal.
  std::uint64_t first = 0;
  std::uint32_t count = 0;
  std::uint32_t length = 0;  // bytes of the payload
  // PUSH: the version of the parameters from which the gradient was computed; kNoVersion, which
  // counts as the oldest, where none were pulled. WAIT: the one to wait for. Replies: the shard's.
  std::uint64_t version = 0;
  // PUSH: the rate as float32, 0 for the rule's own. Replies to PUSH: the staleness. PULL: 1 where
  // the client has the values of its last pull. WAIT: 1 cancels the WAIT of this sequence number,
  // without a reply.
  std::uint32_t extra = 0;
  std::uint32_t zeros[3] = {};

  bool has(MessageFlags flag) const noexcept { return (flags & flag) != 0; }
};
static_assert(sizeof(MessageHeader) == 64 && std::is_trivially_copyable_v<MessageHeader>);

// The most bytes of a payload: with its header it is a transport's usual message.
inline constexpr std::size_t kMostPayload = kUsualFrame - sizeof(MessageHeader);

struct ServeMessage {
  MessageHeader header;
  ConstBytes payload;
};

// Parses a frame, and checks all that can be checked without a table. Throws InvalidArgument, which
// says what is wrong.
ServeMessage parse(ConstBytes frame);

std::string_view name_of(Op op) noexcept;
// Returns the text of a refusal or of statistics.
std::string_view text_of(ConstBytes payload) noexcept;

}  // namespace gradwire::serve
