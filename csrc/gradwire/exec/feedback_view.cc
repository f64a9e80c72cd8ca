#include "gradwire/exec/feedback_view.h"

#include <algorithm>

#include "gradwire/base/error.h"
#include "gradwire/codec/simd.h"

namespace gradwire::exec {

void FeedbackView::bind(std::span<const std::uint64_t> counts,
                        std::span<const codec::KeyedExtent> keys,
                        codec::ErrorFeedback::Transaction& transaction) {
  counts_.assign(counts.begin(), counts.end());
  residuals_.clear();
  errors_.clear();
  adapted_.clear();
  own_.assign(counts.size(), {});
  std::size_t key = 0, used = 0;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (keys.empty()) {
      adapted_.push_back(&own_[i]);
      continue;
    }
    for (; key + 1 < keys.size() && used == keys[key].count; ++key) used = 0;
    if (keys[key].count - used < counts[i])
      throw InvalidArgument("error feedback: key '" + keys[key].key + "' has " +
                            std::to_string(keys[key].count) +
                            " elements, which is not where an array ends; give keys whose counts "
                            "add up to the arrays'");
    const auto residual = transaction.residual(key);
    residuals_.push_back(residual.empty() ? nullptr : residual.data() + used);
    errors_.push_back(transaction.next(key).data() + used);
    adapted_.push_back(&transaction.adapted(key));
    used += counts[i];
  }
  if (!keys.empty() && (key + 1 < keys.size() || used < keys[key].count))
    throw InvalidArgument("error feedback: the keys have more elements than the arrays");
}

codec::Site FeedbackView::site(std::size_t extent, std::uint64_t call) const {
  codec::Site site;
  site.call = call;
  site.adapted = adapted_[extent];
  if (!feeds_back()) return site;
  site.residual = residuals_[extent];
  site.error = errors_[extent];
  return site;
}

void FeedbackView::prepare(const codec::Codec& codec, std::size_t extent, const float* x) const {
  codec.prepare(x, feeds_back() ? residuals_[extent] : nullptr, counts_[extent], *adapted_[extent]);
}

void FeedbackView::adapt(const codec::Codec& codec) const {
  std::size_t elements = 0;
  for (std::size_t i = 0; i < counts_.size(); ++i) {
    elements += counts_[i];
    if (i + 1 < counts_.size() && adapted_[i + 1] == adapted_[i]) continue;
    codec.adapt(elements, *adapted_[i]);
    elements = 0;
  }
}

void FeedbackView::deliver(std::size_t extent, float* x) const {
  if (!feeds_back()) return;
  const auto& sum = codec::kernels().reduce[static_cast<std::size_t>(DType::kFloat32)];
  if (residuals_[extent] != nullptr)
    sum[static_cast<std::size_t>(ReduceOp::kSum)](x, residuals_[extent], counts_[extent]);
  std::fill_n(errors_[extent], counts_[extent], 0.0F);
}

}  // namespace gradwire::exec
