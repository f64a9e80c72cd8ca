#include "gradwire/exec/execution/feedback_view.h"

#include "gradwire/codec/residuals.h"

namespace gradwire::exec {

void FeedbackView::bind(std::span<const std::uint64_t> counts,
                        std::span<const codec::KeyedExtent> keys,
                        codec::ErrorFeedback::Transaction& transaction) {
  feeds_back_ = !keys.empty();
  counts_.assign(counts.begin(), counts.end());
  own_.assign(counts.size(), {});
  sites_.assign(counts.size(), {});
  for (std::size_t i = 0; i < counts.size(); ++i) sites_[i].adapted = &own_[i];
  if (feeds_back_) bind_keys(keys, transaction);
}

void FeedbackView::bind_keys(std::span<const codec::KeyedExtent> keys,
                             codec::ErrorFeedback::Transaction& transaction) {
  place_in_keys(counts_, keys, places_);
  for (std::size_t i = 0; i < counts_.size(); ++i) {
    const auto [key, begin] = places_[i];
    sites_[i] = transaction.site(key).from(begin);
  }
}

codec::Site FeedbackView::site(std::size_t extent, Rank rank, std::uint32_t operation) const {
  codec::Site site = sites_[extent];
  number(site, rank, operation);
  return site;
}

void FeedbackView::prepare(const codec::Codec& codec, std::size_t extent, const float* x) const {
  codec.prepare(x, counts_[extent], sites_[extent]);
}

void FeedbackView::adapt(const codec::Codec& codec) const {
  std::size_t elements = 0;
  for (std::size_t i = 0; i < counts_.size(); ++i) {
    elements += counts_[i];
    if (i + 1 < counts_.size() && sites_[i + 1].adapted == sites_[i].adapted) continue;
    codec.adapt(elements, *sites_[i].adapted);
    elements = 0;
  }
}

void FeedbackView::deliver(std::size_t extent, float* x) const {
  if (feeds_back()) codec::deliver(sites_[extent], x, counts_[extent]);
}

}  // namespace gradwire::exec
