#include "gradwire/exec/execution/feedback_view.h"

#include <string>

#include "gradwire/base/error.h"
#include "gradwire/codec/feedback/residuals.h"

namespace gradwire::exec {

void find_key_offsets(std::span<const std::uint64_t> counts,
                      std::span<const codec::KeyedArray> keys, std::vector<KeyOffset>& out) {
  out.clear();
  std::size_t key = 0, used = 0;
  const auto skip_full = [&] {
    for (; key + 1 < keys.size() && used == keys[key].count; ++key) used = 0;
  };
  for (std::uint64_t count : counts) {
    skip_full();
    if (keys[key].count - used < count)
      throw InvalidArgument("error feedback: key '" + keys[key].key + "' has " +
                            std::to_string(keys[key].count) +
                            " elements, which is not where an array ends; give keys whose counts "
                            "add up to the arrays'");
    out.push_back({key, used});
    used += count;
  }
  skip_full();
  if (key + 1 < keys.size() || used < keys[key].count)
    throw InvalidArgument("error feedback: the keys have more elements than the arrays");
}

void FeedbackView::bind(std::span<const std::uint64_t> counts,
                        std::span<const codec::KeyedArray> keys,
                        codec::ErrorFeedback::Transaction& transaction) {
  feeds_back_ = !keys.empty();
  counts_.assign(counts.begin(), counts.end());
  own_.assign(counts.size(), {});
  contexts_.assign(counts.size(), {});
  for (std::size_t i = 0; i < counts.size(); ++i) contexts_[i].codec_state = &own_[i];
  if (feeds_back_) bind_keys(keys, transaction);
}

void FeedbackView::bind_keys(std::span<const codec::KeyedArray> keys,
                             codec::ErrorFeedback::Transaction& transaction) {
  find_key_offsets(counts_, keys, key_offsets_);
  for (std::size_t i = 0; i < counts_.size(); ++i) {
    const auto [key, begin] = key_offsets_[i];
    contexts_[i] = transaction.context(key).from(begin);
  }
}

codec::EncodeContext FeedbackView::context(std::size_t array, Rank rank,
                                           std::uint32_t operation) const {
  codec::EncodeContext context = contexts_[array];
  number(context, rank, operation);
  return context;
}

void FeedbackView::prepare(const codec::Codec& codec, std::size_t array, const float* x) const {
  codec.prepare(x, counts_[array], contexts_[array]);
}

void FeedbackView::adapt(const codec::Codec& codec) const {
  std::size_t elements = 0;
  for (std::size_t i = 0; i < counts_.size(); ++i) {
    elements += counts_[i];
    if (i + 1 < counts_.size() && contexts_[i + 1].codec_state == contexts_[i].codec_state)
      continue;
    codec.adapt(elements, *contexts_[i].codec_state);
    elements = 0;
  }
}

void FeedbackView::deliver(std::size_t array, float* x) const {
  if (feeds_back()) codec::deliver(contexts_[array], x, counts_[array]);
}

void FeedbackView::deliver_before(std::size_t array, float* x) {
  deliver(array, x);
  contexts_[array].residual = nullptr;
  contexts_[array].narrow_residual = nullptr;
}

}  // namespace gradwire::exec
