// Outgoing: a gradient, or initial values, while they are sent to all shards. The error feedback
// takes, by parameter, what a codec does not deliver and what could not be sent.
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

// One for each parameter, of words: see ParameterTable::words().
using Gradients = std::vector<std::span<const float>>;

class Outgoing {
 public:
  // `codecs`: the table's. `choice`: for each parameter, the index of its codec. `feedback` may be
  // null. The arrays must stay valid until close().
  Outgoing(const ParameterTable& table, Gradients gradients, const Codecs& codecs,
           std::vector<std::uint8_t> choice, std::shared_ptr<codec::ErrorFeedback> feedback);

  // Opens the residuals; to be called before the first frame. Throws InvalidArgument, and changes
  // nothing, where they are in use or the gradient holds NaN or Inf.
  void open();
  // Returns the codec for the header of a frame: an index, or kMixedCodecs.
  std::uint16_t codec_of(const ShardLayout& layout, const ShardFrame& frame) const;
  // Writes one frame's payload; returns its bytes.
  std::size_t encode(const ShardLayout& layout, const ShardFrame& frame, Bytes out, Copy copy);
  // Moves a whole frame into the residuals: it was not delivered.
  void keep(const ShardLayout& layout, const ShardFrame& frame);
  // Commits the residuals; to be called after the last frame.
  void close();

  // Collects a payload that a shard refused; finish_giving_back() adds all of them to the
  // residuals, which must not be open.
  void give_back(const ShardLayout& layout, const ShardFrame& frame, ConstBytes payload);
  void finish_giving_back();

 private:
  codec::EncodeContext context(const ParameterSpan& span) const;

  const codec::Codec& codec(std::size_t parameter) const { return *codecs_[choice_[parameter]]; }

  const ParameterTable* table_;
  Gradients gradients_;
  const Codecs codecs_;
  const std::vector<std::uint8_t> choice_;  // by parameter
  std::shared_ptr<codec::ErrorFeedback> feedback_;
  codec::ErrorFeedback::Transaction transaction_;
  std::vector<std::vector<float>> returned_;  // by parameter; empty where there is nothing
};

}  // namespace gradwire::serve
