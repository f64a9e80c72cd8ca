// The layout of messages in a tcp stream, and the memory that they wait in on either side.
#pragma once

#include <cstring>
#include <memory>
#include <optional>

#include "gradwire/transport/cells.h"
#include "gradwire/transport/socket.h"

namespace gradwire::transport {

inline constexpr std::size_t kReadAhead =
    8192;  // a small message takes one call; leftover bytes are moved to the front

struct Prefix {
  std::uint32_t length = 0;
  std::uint32_t check = ~0U;  // the length inverted: foreign bytes and lost sync show at once

  explicit Prefix(std::size_t bytes) : length(static_cast<std::uint32_t>(bytes)), check(~length) {}
  Prefix() = default;
  bool valid(std::size_t most) const { return check == ~length && length <= most; }
};
inline constexpr std::size_t kPayloadAt = kLine;  // aligned; the prefix is right before it
inline constexpr std::size_t kFrameAt = kPayloadAt - sizeof(Prefix);

inline std::size_t frame_bytes(std::size_t payload) {
  return sizeof(Prefix) + (payload + 7) / 8 * 8;
}

// Memory in whole cache lines, not touched until it is used.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(std::size_t bytes)
      : lines_(std::make_unique_for_overwrite<Line[]>((bytes + kLine - 1) / kLine)) {}
  std::byte* data() noexcept { return lines_[0].bytes; }

 private:
  struct alignas(kLine) Line {
    std::byte bytes[kLine];
  };
  std::unique_ptr<Line[]> lines_;
};

// The received part of a stream: [begin, end) of a buffer that holds the largest frame and more.
class Inbox {
 public:
  Inbox() = default;
  explicit Inbox(std::size_t max_message)
      : max_message_(max_message), buffer_(kFrameAt + frame_bytes(max_message) + kReadAhead) {}

  // Returns the payload of the front frame once all of it is here.
  std::optional<ConstBytes> front(const LinkId& link) {
    if (size() < sizeof(Prefix)) return std::nullopt;
    const Prefix prefix = front_prefix();
    if (!prefix.valid(max_message_))
      throw_transport_error(link, "impossible message length " + std::to_string(prefix.length) +
                                      ", the limit is " + std::to_string(max_message_));
    if (size() < frame_bytes(prefix.length)) return std::nullopt;
    return ConstBytes{buffer_.data() + begin_ + sizeof(Prefix), prefix.length};
  }
  void pop() { begin_ += frame_bytes(front_prefix().length); }
  bool empty() const noexcept { return size() == 0; }

  // Returns room for the rest of the incomplete front frame, and kReadAhead bytes more.
  Bytes room() {
    move_to_front();
    const std::size_t wanted =
        size() < sizeof(Prefix) ? 0 : frame_bytes(front_prefix().length) - size();
    return {buffer_.data() + end_, wanted + kReadAhead};
  }
  void received(std::size_t bytes) noexcept { end_ += bytes; }

 private:
  std::size_t size() const noexcept { return end_ - begin_; }
  Prefix front_prefix() {
    Prefix prefix;
    std::memcpy(&prefix, buffer_.data() + begin_, sizeof prefix);
    return prefix;
  }
  void move_to_front() {
    if (begin_ == kFrameAt) return;
    std::memmove(buffer_.data() + kFrameAt, buffer_.data() + begin_, size());
    end_ = kFrameAt + size();
    begin_ = kFrameAt;
  }

  std::size_t max_message_ = 0;
  AlignedBuffer buffer_;
  std::size_t begin_ = kFrameAt;
  std::size_t end_ = kFrameAt;
};

}  // namespace gradwire::transport
