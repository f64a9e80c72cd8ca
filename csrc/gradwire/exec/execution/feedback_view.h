// FeedbackView: finds the residuals of a request's extents, extent by extent, in an open
// transaction, and holds what codecs adapt to the extents, with feedback or without.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "gradwire/codec/feedback/feedback.h"

namespace gradwire::exec {

struct KeyOffset {
  std::size_t key = 0;    // which of the call's keys
  std::size_t begin = 0;  // elements of the key before the extent
};

// Writes one offset per extent. The keys, of which there is at least one, must lie end to end over
// the extents, and each extent must belong to one key; else this throws InvalidArgument.
void find_key_offsets(std::span<const std::uint64_t> counts,
                      std::span<const codec::KeyedExtent> keys, std::vector<KeyOffset>& out);

class FeedbackView {
 public:
  // Finds each extent's key. The keys must lie end to end over the extents, and each extent must
  // belong to one key; else this throws InvalidArgument. Without keys there is no feedback, and the
  // transaction is left alone.
  void bind(std::span<const std::uint64_t> counts, std::span<const codec::KeyedExtent> keys,
            codec::ErrorFeedback::Transaction& transaction);

  void clear() { bind({}, {}, none_); }

  bool feeds_back() const noexcept { return feeds_back_; }
  // Returns one context per extent. Without feedback they keep nothing. Each needs number() before
  // use.
  std::span<const codec::EncodeContext> contexts() const noexcept { return contexts_; }

  // Returns the context of a whole extent that is encoded in one run.
  codec::EncodeContext context(std::size_t extent, Rank rank, std::uint32_t operation) const;
  void prepare(const codec::Codec& codec, std::size_t extent, const float* x) const;
  // Adapts each key once, even if several extents belong to it.
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
  std::vector<codec::CodecState> own_;  // used without feedback
  codec::ErrorFeedback::Transaction none_;
};

// Sets EncodeContext::call. No two ranks or calls of a job share it, so their random roundings
// differ. With feedback it depends on the key's calls, so that a resumed job rounds like one that
// was not interrupted; without, on the communicator's calls.
inline void number(codec::EncodeContext& context, Rank rank, std::uint32_t operation) {
  if (!context.keeps()) context.call = operation;
  context.call ^= static_cast<std::uint64_t>(rank) << 48;
}

}  // namespace gradwire::exec
