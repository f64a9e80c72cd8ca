#include "gradwire/exec/execution/operation.h"

#include <algorithm>
#include <cstring>

#include "gradwire/codec/reduction/fold.h"
#include "gradwire/codec/simd/simd.h"

namespace gradwire::exec {
void Operation::bind(const Request& request, std::shared_ptr<const Plan> plan,
                     codec::ErrorFeedback::Transaction& transaction) {
  plan_ = std::move(plan);
  buffer_map_.make(request, *plan_, [this](std::size_t bytes) {
    if (scratch_.size() < bytes) scratch_.resize(bytes);
    return scratch_.data();
  });
  const bool feeds_back = transaction.is_open();
  if (plan_->lossy() || feeds_back)
    feedback_.bind(plan_->folds() ? plan_->spec().counts : plan_->counts(),
                   feeds_back ? request.keys : decltype(request.keys){}, transaction);
  else
    feedback_.clear();
}

void Operation::copy(const std::vector<CopyStep>& steps) {
  for (const CopyStep& each : steps) std::memmove(each.to, each.from, each.bytes);
}

void Operation::begin() {
  copy(buffer_map_.before());
  if (!plan_->lossy()) return deliver_residuals();
  for (std::size_t i = 0; i < arrays().size(); ++i) {
    if (plan_->codec().between_sites()) feedback_.deliver_before(i, floats(i));
    feedback_.prepare(plan_->codec(), i, floats(i));
  }
}

// Delivers the whole residuals with a plain sum, which loses nothing.
void Operation::deliver_residuals() const {
  if (!feedback_.feeds_back()) return;
  const auto& own = plan_->folds() ? buffer_map_.addends() : arrays();
  for (std::size_t i = 0; i < own.size(); ++i)
    feedback_.deliver(i, reinterpret_cast<float*>(own[i]));
}

bool Operation::end(bool finite) {
  if (plan_->folds()) fold();
  copy(buffer_map_.after());
  if (plan_->lossy()) feedback_.adapt(plan_->codec());
  if (!feedback_.feeds_back() || plan_->lossy()) return finite;
  return finite && all_finite();
}

// Adds in the order of the ranks, so that all of them get the same bits.
void Operation::fold() const {
  const OpSpec& spec = plan_->spec();
  std::size_t offset = 0;
  for (const Array& sum : buffer_map_.sums()) {
    codec::fold_all(spec.dtype, spec.op, arrays(), offset, sum.data, plan_->divisor(), sum.count);
    offset += sum.count * size_of(spec.dtype);
  }
}

bool Operation::all_finite() const {
  const auto finite = [](std::byte* data, std::uint64_t count) {
    return codec::kernels().finite(reinterpret_cast<float*>(data), count);
  };
  if (plan_->folds())
    return std::ranges::all_of(buffer_map_.sums(),
                               [&](const Array& sum) { return finite(sum.data, sum.count); });
  for (std::size_t i = 0; i < arrays().size(); ++i)
    if (!finite(arrays()[i], plan_->counts()[i])) return false;
  return true;
}

Execution::Call Operation::call() const {
  Execution::Call call;
  call.plan = plan_.get();
  call.arrays = arrays();
  if (!plan_->lossy()) return call;
  call.contexts = feedback_.contexts();
  return call;
}

}  // namespace gradwire::exec
