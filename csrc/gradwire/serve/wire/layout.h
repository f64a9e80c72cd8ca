// ShardLayout: which elements a shard holds, and in which frames they travel. It follows from the
// ParameterTable alone, so a client and a server compute the same.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "gradwire/codec/codec.h"
#include "gradwire/serve/wire/message.h"
#include "gradwire/serve/wire/table.h"

namespace gradwire::serve {

// Consecutive elements of one parameter within a shard. Codecs encode each span separately.
struct ParameterSpan {
  std::size_t parameter = 0;
  std::size_t offset = 0;  // in the parameter
  std::size_t first = 0;   // in the shard's elements
  std::size_t count = 0;
};

// Consecutive elements of a shard that travel in one message.
struct ShardFrame {
  std::size_t first = 0, count = 0;
  std::size_t span = 0, spans = 0;  // which of ShardLayout::spans()
};

// The most words of a frame, which fit a message whatever the codec.
inline constexpr std::size_t kMostFrame = 28'672;

using Codecs = std::vector<std::shared_ptr<const codec::Codec>>;
Codecs codecs_of(const ParameterTable& table);

class ShardLayout {
 public:
  ShardLayout(const ParameterTable& table, const Codecs& codecs, std::uint32_t shard);

  std::size_t elements() const noexcept { return elements_; }
  std::size_t words() const noexcept { return words_; }  // of an element: see ParameterTable
  const std::vector<ShardFrame>& frames() const noexcept { return frames_; }
  const std::vector<ParameterSpan>& spans() const noexcept { return spans_; }
  std::span<const ParameterSpan> spans(const ShardFrame& frame) const noexcept {
    return std::span(spans_).subspan(frame.span, frame.spans);
  }
  // Says in a header that its payload is of this frame: first, count, and the flags for its place.
  void describe(std::size_t index, MessageHeader& header) const;
  // Returns whether the header says so; false where there is no such frame.
  bool is_described(std::size_t index, const MessageHeader& header) const;

 private:
  void divide(const ParameterTable& table, std::uint64_t begin, std::uint64_t end);
  void join_into_frames(const Codecs& codecs, std::size_t most);

  std::size_t elements_ = 0;
  std::size_t words_ = 1;
  std::vector<ParameterSpan> spans_;
  std::vector<ShardFrame> frames_;
};

// Decodes a frame's payload to y[0, frame.count · words), or adds it to what is there (not
// float64). `codec` is the header's: an index, or kMixedCodecs. Throws InvalidArgument where the
// payload does not fit the frame. Returns whether all values are finite.
bool decode_frame(const Codecs& codecs, std::uint16_t codec, const ShardLayout& layout,
                  const ShardFrame& frame, ConstBytes payload, bool add, float* y);

}  // namespace gradwire::serve
