#include "gradwire/serve/wire/message.h"

#include <cstring>
#include <string>

#include "gradwire/base/error.h"

namespace gradwire::serve {
namespace {

constexpr auto kFirstOp = static_cast<unsigned>(Op::kJoin);
constexpr auto kLastOp = static_cast<unsigned>(Op::kBye);
constexpr unsigned kAllFlags = kFirst | kLast | kReply | kRefused;

// Returns what is wrong with the header of a frame of so many payload bytes; null where nothing is.
const char* fault_of(const MessageHeader& header, std::size_t payload) {
  const auto op = static_cast<unsigned>(header.op);
  if (header.magic != kMessageMagic) return "it is none of this version";
  if (op < kFirstOp || op > kLastOp) return "there is no such request";
  if ((header.flags & ~kAllFlags) != 0) return "it has unknown flags";
  if (header.has(kRefused) && !header.has(kReply)) return "a request can't be a refusal";
  if (header.zero != 0 || (header.zeros[0] | header.zeros[1] | header.zeros[2]) != 0)
    return "reserved bytes are not zero";
  if (header.length != payload || payload > kMostPayload) return "its length is wrong";
  return nullptr;
}

}  // namespace

ServeMessage parse(ConstBytes frame) {
  ServeMessage message;
  if (frame.size() < sizeof message.header)
    throw InvalidArgument(str_cat("a frame of ", frame.size(), " bytes has no header"));
  std::memcpy(&message.header, frame.data(), sizeof message.header);
  message.payload = frame.subspan(sizeof message.header);
  if (const char* fault = fault_of(message.header, message.payload.size()))
    throw InvalidArgument(str_cat("a frame of ", frame.size(), " bytes: ", fault));
  return message;
}

std::string_view name_of(Op op) noexcept {
  switch (op) {
    case Op::kJoin:
      return "join";
    case Op::kSet:
      return "set";
    case Op::kPush:
      return "push";
    case Op::kPull:
      return "pull";
    case Op::kWait:
      return "wait";
    case Op::kStats:
      return "stats";
    case Op::kSnapshot:
      return "snapshot";
    case Op::kAsk:
      return "ask";
    case Op::kBye:
      return "bye";
  }
  return "unknown";
}

std::string_view text_of(ConstBytes payload) noexcept {
  return {reinterpret_cast<const char*>(payload.data()), payload.size()};
}

}  // namespace gradwire::serve
