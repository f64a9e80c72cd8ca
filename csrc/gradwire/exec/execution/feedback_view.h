// FeedbackView: the residuals of each of a request's arrays in an open transaction, and the state
// that codecs adapt to each array, with error feedback or without.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "gradwire/codec/feedback/feedback.h"

namespace gradwire::exec {

struct KeyOffset {
  std::size_t key = 0;    // which of the call's keys
  std::size_t begin = 0;  // elements of the key before the array
};

// Writes one offset per array. The keys, of which there is at least one, must lie end to end over
// the arrays, and each array must belong to one key; else this throws InvalidArgument.
void find_key_offsets(std::span<const std::uint64_t> counts,
                      std::span<const codec::KeyedArray> keys, std::vector<KeyOffset>& out);

class FeedbackView {
 public:
  // Finds each array's key, as find_key_offsets() does. Without keys there is no feedback, and the
  // transaction is not used.
  void bind(std::span<const std::uint64_t> counts, std::span<const codec::KeyedArray> keys,
            codec::ErrorFeedback::Transaction& transaction);

  void clear() { bind({}, {}, none_); }

  bool feeds_back() const noexcept { return feeds_back_; }
  // Returns one context per array, without residuals if there is no feedback. Before use each needs
  // number().
  std::span<const codec::EncodeContext> contexts() const noexcept { return contexts_; }

  // Returns the context of an array that is encoded whole, with number() applied.
  codec::EncodeContext context(std::size_t array, Rank rank, std::uint32_t operation) const;
  void prepare(const codec::Codec& codec, std::size_t array, const float* x) const;
  // Adapts each key once, even if several arrays belong to it.
  void adapt(const codec::Codec& codec) const;
  // Adds the whole residual to an array that is not encoded.
  void deliver(std::size_t array, float* x) const;
  // Does so with an array of which only parts are encoded: these have no residual then.
  void deliver_before(std::size_t array, float* x);

 private:
  void bind_keys(std::span<const codec::KeyedArray> keys,
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
