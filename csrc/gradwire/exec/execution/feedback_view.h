// FeedbackView: where the residuals of a request's extents lie, extent by extent, in an open
// transaction; and what codecs adapt to them, with feedback or without.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "gradwire/codec/feedback.h"
#include "gradwire/exec/execution/key_offsets.h"

namespace gradwire::exec {

class FeedbackView {
 public:
  // The keys lie end to end over the extents, each of which belongs to one key; else
  // InvalidArgument. No keys: no feedback, and the transaction is left alone.
  void bind(std::span<const std::uint64_t> counts, std::span<const codec::KeyedExtent> keys,
            codec::ErrorFeedback::Transaction& transaction);

  void clear() { bind({}, {}, none_); }

  bool feeds_back() const noexcept { return feeds_back_; }
  // One per extent; they keep nothing without feedback. Each needs number() before use.
  std::span<const codec::EncodeContext> contexts() const noexcept { return contexts_; }
  // With feedback: which of the transaction's keys the extent belongs to.
  std::size_t key(std::size_t extent) const { return key_offsets_[extent].key; }

  // The context of a whole extent that is encoded in one run.
  codec::EncodeContext context(std::size_t extent, Rank rank, std::uint32_t operation) const;
  void prepare(const codec::Codec& codec, std::size_t extent, const float* x) const;
  // Adapts each key once, also where several extents belong to it.
  void adapt(const codec::Codec& codec) const;
  // Adds the whole residual to an extent that is never encoded.
  void deliver(std::size_t extent, float* x) const;

 private:
  void bind_keys(std::span<const codec::KeyedExtent> keys,
                 codec::ErrorFeedback::Transaction& transaction);

  bool feeds_back_ = false;
  std::vector<std::uint64_t> counts_;
  std::vector<codec::EncodeContext> contexts_;
  std::vector<KeyOffset> key_offsets_;
  std::vector<codec::CodecState> own_;  // without feedback
  codec::ErrorFeedback::Transaction none_;
};

// Sets EncodeContext::call: no two ranks and calls of a job share it, so their random roundings
// differ. With feedback it depends on the key's calls, so that a resumed job rounds as one that was
// not interrupted; else on the communicator's.
inline void number(codec::EncodeContext& context, Rank rank, std::uint32_t operation) {
  if (!context.keeps()) context.call = operation;
  context.call ^= static_cast<std::uint64_t>(rank) << 48;
}

}  // namespace gradwire::exec
