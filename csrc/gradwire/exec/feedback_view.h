// FeedbackView: where the residuals of a request's extents lie, extent by extent, in an open
// transaction; and what codecs adapt to them, with feedback or without.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "gradwire/codec/feedback.h"

namespace gradwire::exec {

// Site::call: no two ranks and calls of a job share it, so their random roundings differ.
inline std::uint64_t call_number(Rank rank, std::uint32_t operation) {
  return static_cast<std::uint64_t>(rank) << 32 | operation;
}

class FeedbackView {
 public:
  // The keys lie end to end over the extents, each of which belongs to one key; else
  // InvalidArgument. No keys: no feedback, and the transaction is left alone.
  void bind(std::span<const std::uint64_t> counts, std::span<const codec::KeyedExtent> keys,
            codec::ErrorFeedback::Transaction& transaction);

  void clear() { bind({}, {}, none_); }

  bool feeds_back() const noexcept { return !errors_.empty(); }
  // By extent. The first two are empty without feedback; a null residual means zero.
  std::span<const float* const> residuals() const noexcept { return residuals_; }
  std::span<float* const> errors() const noexcept { return errors_; }
  std::span<codec::Adapted* const> adapted() const noexcept { return adapted_; }

  // A whole extent, to be encoded at once.
  codec::Site site(std::size_t extent, std::uint64_t call) const;
  void prepare(const codec::Codec& codec, std::size_t extent, const float* x) const;
  // Once a key, though several extents may be of it.
  void adapt(const codec::Codec& codec) const;
  // What is never encoded delivers its whole residual.
  void deliver(std::size_t extent, float* x) const;

 private:
  std::vector<std::uint64_t> counts_;
  std::vector<const float*> residuals_;
  std::vector<float*> errors_;
  std::vector<codec::Adapted*> adapted_;
  std::vector<codec::Adapted> own_;  // without feedback
  codec::ErrorFeedback::Transaction none_;
};

}  // namespace gradwire::exec
