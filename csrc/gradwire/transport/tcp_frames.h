// The layout of messages in a tcp stream, and the buffers that hold them on both sides.
#pragma once

#include <cstring>
#include <memory>
#include <optional>

#include "gradwire/transport/socket.h"
#include "gradwire/transport/transport.h"

namespace gradwire::transport {

inline constexpr std::size_t kReadAhead =
    8192;  // a small message takes one call; leftover bytes are moved to the front

// How many frames, which are numbered in the order of sending, may be on their way at once over the
// streams of a link.
inline constexpr std::uint32_t kAhead = 1U << 24;

// How old a frame may be that comes once more: a way that works again brings what was stuck there.
inline constexpr std::int32_t kMostBehind = 1 << 28;

struct Prefix {
  std::uint32_t length = 0;
  // ~length XOR the frame's number, which is 0 where a link has one stream: reveals foreign bytes
  // and lost synchronization at once.
  std::uint32_t check = ~0U;

  explicit Prefix(std::size_t bytes, std::uint32_t number = 0)
      : length(static_cast<std::uint32_t>(bytes)), check(~length ^ number) {}
  Prefix() = default;
  std::uint32_t number() const { return check ^ ~length; }
  // Returns whether the number is one of the `ahead` from `next` on; numbers wrap around.
  bool valid(std::size_t most, std::uint32_t next, std::uint32_t ahead) const {
    return number() - next < ahead && length <= most;
  }
};
inline constexpr std::size_t kPayloadAt = kLine;  // aligned; the prefix is right before it
inline constexpr std::size_t kFrameAt = kPayloadAt - sizeof(Prefix);

inline std::size_t frame_bytes(std::size_t payload) {
  return sizeof(Prefix) + (payload + 7) / 8 * 8;
}

// Uninitialized memory, aligned to cache lines.
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

// Memory for the largest frame, with a tag.
inline AlignedBuffer frame_buffer(std::size_t max_message) {
  return AlignedBuffer(kFrameAt + frame_bytes(max_message) + crypto::kTagBytes);
}

// The received and unread bytes of a stream, in a buffer that holds the largest message and
// kReadAhead bytes more.
class Inbox {
 public:
  Inbox() = default;
  // Frames are sealed where there is a `seal`, which must outlive the inbox.
  explicit Inbox(std::size_t max_message, crypto::Seal* seal = nullptr)
      : max_message_(max_message),
        seal_(seal),
        buffer_(kFrameAt + frame_bytes(max_message) + crypto::kTagBytes + kReadAhead) {}

  // Returns the payload of the front frame once all of it is here, and it has the number `next`;
  // its number may be ahead of that by less than `ahead`. Returns it once before its pop(). Throws
  // TransportError for what the peer can't have sent.
  std::optional<ConstBytes> front(const LinkId& link, std::uint32_t next = 0,
                                  std::uint32_t ahead = 1) {
    if (size() < sizeof(Prefix)) return std::nullopt;
    const Prefix prefix = front_prefix();
    if (!prefix.valid(max_message_, next, ahead))
      throw_transport_error(link, "impossible message length " + std::to_string(prefix.length) +
                                      ", the limit is " + std::to_string(max_message_));
    if (!has_frame() || prefix.number() != next) return std::nullopt;
    const Bytes frame(buffer_.data() + begin_, bytes_on_wire(prefix));
    if (seal_ != nullptr && !opens(frame, link)) throw_transport_error(link, crypto::kChanged);
    return frame.subspan(sizeof(Prefix), prefix.length);
  }
  // Returns the front frame once all of it is here, whatever its number, which may be ahead of
  // `next` by less than `ahead`. Returns it once before its pop(). Throws as front() does.
  struct Numbered {
    std::uint32_t number;
    ConstBytes payload;
  };
  std::optional<Numbered> any(const LinkId& link, std::uint32_t next, std::uint32_t ahead) {
    if (size() < sizeof(Prefix)) return std::nullopt;
    const std::uint32_t number = front_prefix().number();
    const auto distance = static_cast<std::int32_t>(number - next);
    const auto payload = front(link, number, 1);
    if (distance < -kMostBehind || distance >= static_cast<std::int32_t>(ahead))
      throw_transport_error(link, "impossible frame number " + std::to_string(number) +
                                      ", the next one is " + std::to_string(next));
    if (!payload) return std::nullopt;
    return Numbered{number, *payload};
  }
  // Returns whether all of the front frame is here.
  bool has_frame() { return size() >= sizeof(Prefix) && size() >= bytes_on_wire(front_prefix()); }
  void pop() { begin_ += bytes_on_wire(front_prefix()); }
  bool empty() const noexcept { return size() == 0; }

  // Returns room for the rest of the incomplete front frame, and kReadAhead bytes more.
  Bytes room() {
    move_to_front();
    return {buffer_.data() + end_, missing() + kReadAhead};
  }
  void received(std::size_t bytes) noexcept { end_ += bytes; }
  // Returns how many bytes of the front frame are not here; of its prefix, while that is not whole.
  std::size_t missing() {
    return (size() < sizeof(Prefix) ? sizeof(Prefix) : bytes_on_wire(front_prefix())) - size();
  }

 private:
  bool opens(Bytes frame, const LinkId& link) {
    return sealing(link, [&] {
      return seal_->open(frame.first(sizeof(Prefix)), frame.subspan(sizeof(Prefix)));
    });
  }
  std::size_t size() const noexcept { return end_ - begin_; }
  std::size_t bytes_on_wire(const Prefix& prefix) const noexcept {
    return frame_bytes(prefix.length) + (seal_ == nullptr ? 0 : crypto::kTagBytes);
  }
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
  crypto::Seal* seal_ = nullptr;
  AlignedBuffer buffer_;
  std::size_t begin_ = kFrameAt;
  std::size_t end_ = kFrameAt;
};

}  // namespace gradwire::transport
