// Outgoing: a gradient, or initial values, while they are sent to all shards. What a codec does not
// deliver goes into the error feedback, by parameter, and so does what could not be sent.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "gradwire/base/copy.h"
#include "gradwire/codec/feedback/feedback.h"
#include "gradwire/serve/wire/layout.h"
#include "gradwire/serve/wire/table.h"

namespace gradwire::serve {

// One for each parameter, of words: see Table::words().
using Gradients = std::vector<std::span<const float>>;

class Outgoing {
 public:
  // `codecs`: of the table. `choice` has the index of each parameter's. `feedback` may be null. The
  // arrays must stay until close().
  Outgoing(const Table& table, Gradients gradients, const Codecs& codecs,
           std::vector<std::uint8_t> choice, std::shared_ptr<codec::ErrorFeedback> feedback);

  // Before the first frame: opens the residuals. Throws InvalidArgument, and changes nothing, where
  // they are in use or the gradient holds NaN or Inf: what a shard refuses would be lost.
  void open();
  // Returns what the header of a frame has as codec: an index, or kMixedCodecs.
  std::uint16_t codec_of(const Layout& layout, const ShardFrame& frame) const;
  // Writes one frame's payload; returns its bytes.
  std::size_t encode(const Layout& layout, const ShardFrame& frame, Bytes out, Copy copy);
  // Moves a frame into the residuals, as if it had not been encoded.
  void keep(const Layout& layout, const ShardFrame& frame);
  // After the last frame: the residuals of this call become those of the next one.
  void close();

  // Adds a payload that a shard refused to the residuals, when none are open.
  void give_back(const Layout& layout, const ShardFrame& frame, ConstBytes payload);
  void finish_giving_back();

 private:
  codec::EncodeContext context(const Piece& piece) const;

  const codec::Codec& codec(std::size_t parameter) const { return *codecs_[choice_[parameter]]; }

  const Table* table_;
  Gradients gradients_;
  const Codecs codecs_;
  const std::vector<std::uint8_t> choice_;  // by parameter
  std::shared_ptr<codec::ErrorFeedback> feedback_;
  codec::ErrorFeedback::Transaction transaction_;
  std::vector<std::vector<float>> returned_;  // by parameter; empty where there is nothing
};

}  // namespace gradwire::serve
