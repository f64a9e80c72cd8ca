#include "gradwire/exec/feedback_view.h"

#include <algorithm>

#include "gradwire/base/error.h"
#include "gradwire/codec/simd.h"

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
  keys_.clear();
  std::size_t key = 0, used = 0;
  const auto skip_full = [&] {
    for (; key + 1 < keys.size() && used == keys[key].count; ++key) used = 0;
  };
  for (std::size_t i = 0; i < counts_.size(); ++i) {
    skip_full();
    if (keys[key].count - used < counts_[i])
      throw InvalidArgument("error feedback: key '" + keys[key].key + "' has " +
                            std::to_string(keys[key].count) +
                            " elements, which is not where an array ends; give keys whose counts "
                            "add up to the arrays'");
    keys_.push_back(key);
    const auto residual = transaction.residual(key);
    codec::Site& site = sites_[i];
    site.call = transaction.number(key);
    site.element = used;
    site.residual = residual.empty() ? nullptr : residual.data() + used;
    site.error = transaction.next(key).data() + used;
    site.adapted = &transaction.adapted(key);
    used += counts_[i];
  }
  skip_full();
  if (key + 1 < keys.size() || used < keys[key].count)
    throw InvalidArgument("error feedback: the keys have more elements than the arrays");
}

codec::Site FeedbackView::site(std::size_t extent, Rank rank, std::uint32_t operation) const {
  codec::Site site = sites_[extent];
  number(site, rank, operation);
  return site;
}

void FeedbackView::prepare(const codec::Codec& codec, std::size_t extent, const float* x) const {
  const codec::Site& site = sites_[extent];
  codec.prepare(x, site.residual, counts_[extent], *site.adapted);
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
  if (!feeds_back()) return;
  const codec::Site& site = sites_[extent];
  const auto& sum = codec::kernels().reduce[static_cast<std::size_t>(DType::kFloat32)];
  if (site.residual != nullptr)
    sum[static_cast<std::size_t>(ReduceOp::kSum)](x, site.residual, counts_[extent]);
  std::fill_n(site.error, counts_[extent], 0.0F);
}

}  // namespace gradwire::exec
