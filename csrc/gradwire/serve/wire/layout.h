// Layout: which elements each shard holds, and in which frames they travel. It follows from the
// Table alone, so a client and a server have the same.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "gradwire/codec/codec.h"
#include "gradwire/serve/wire/message.h"
#include "gradwire/serve/wire/table.h"

namespace gradwire::serve {

// Elements of one parameter. A codec encodes a piece by itself.
struct Piece {
  std::size_t parameter = 0;
  std::size_t offset = 0;  // in the parameter
  std::size_t first = 0;   // in the shard's range
  std::size_t count = 0;
};

// Consecutive elements of a shard's range that travel in one message.
struct ShardFrame {
  std::size_t first = 0, count = 0;
  std::size_t piece = 0, pieces = 0;  // which of Layout::pieces()
};

// The most words of a frame: they fill a message but for a part.
inline constexpr std::size_t kMostFrame = 28'672;

using Codecs = std::vector<std::shared_ptr<const codec::Codec>>;
Codecs codecs_of(const Table& table);

class Layout {
 public:
  Layout(const Table& table, const Codecs& codecs, std::uint32_t shard);

  std::size_t elements() const noexcept { return elements_; }
  std::size_t words() const noexcept { return words_; }  // of an element: see Table
  const std::vector<ShardFrame>& frames() const noexcept { return frames_; }
  const std::vector<Piece>& pieces() const noexcept { return pieces_; }
  std::span<const Piece> pieces(const ShardFrame& frame) const noexcept {
    return std::span(pieces_).subspan(frame.piece, frame.pieces);
  }
  // Says in a header that its payload is of this frame: first, count, and the flags for its place.
  void describe(std::size_t index, MessageHeader& header) const;
  // Returns whether the header says so; false where there is no such frame.
  bool is_described(std::size_t index, const MessageHeader& header) const;

 private:
  void cut(const Table& table, std::uint64_t begin, std::uint64_t end);
  void group(const Codecs& codecs, std::size_t most);

  std::size_t elements_ = 0;
  std::size_t words_ = 1;
  std::vector<Piece> pieces_;
  std::vector<ShardFrame> frames_;
};

// Decodes a frame's payload to y[0, frame.count · words), or adds it. `codec` is its header's: an
// index, or kMixedCodecs. Throws InvalidArgument where the payload is none of this frame. Float64
// cannot be added. Returns whether all values are finite.
bool decode_frame(const Codecs& codecs, std::uint16_t codec, const Layout& layout,
                  const ShardFrame& frame, ConstBytes payload, bool add, float* y);

}  // namespace gradwire::serve
