#include "gradwire/codec/feedback.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "gradwire/base/error.h"
#include "gradwire/base/op.h"
#include "gradwire/codec/simd.h"

namespace gradwire::codec {
namespace {

void check_length(const std::string& key, std::size_t stored, std::size_t wanted) {
  if (stored == 0 || stored == wanted) return;
  throw InvalidArgument("error feedback: key '" + key + "' has a residual of " +
                        std::to_string(stored) + " elements, this call has " +
                        std::to_string(wanted) + "; use another key, or clear()");
}

void check_closed(const std::string& key, bool open) {
  if (!open) return;
  throw InvalidArgument("error feedback: key '" + key +
                        "' is in an unfinished call; wait for it, and give each key once a call");
}

void check_finite(const std::string& key, const std::vector<float>& values, const char* what) {
  if (kernels().finite(values.data(), values.size())) return;
  throw InvalidArgument("error feedback: " + std::string(what) + " '" + key +
                        "' would hold NaN or Inf; nothing was changed");
}

// Of what codecs adapt to.
bool usable(float magnitude) { return magnitude >= 0 && std::isfinite(magnitude); }

void check_kept(const std::string& key, const ErrorFeedback::Kept& kept) {
  check_finite(key, kept.residual, "the residual of key");
  check_finite(key, kept.memory, "the codec's memory of key");
  if (usable(kept.adapted.tau) && usable(kept.adapted.filter)) return;
  throw InvalidArgument("error feedback: tau " + std::to_string(kept.adapted.tau) + " and filter " +
                        std::to_string(kept.adapted.filter) + " of key '" + key +
                        "' must be finite and not below 0; nothing was changed");
}

float scaled(float magnitude, double factor) {
  const double most = std::numeric_limits<float>::max();
  return static_cast<float>(std::min(magnitude * std::fabs(factor), most));
}

}  // namespace

void ErrorFeedback::Transaction::open(ErrorFeedback& owner, std::span<const KeyedExtent> extents) {
  settle(false);
  const std::lock_guard lock(owner.mutex_);
  try {
    for (const KeyedExtent& extent : extents) owner.open(extent, entries_);
  } catch (...) {
    owner.close(entries_, /*keep=*/false);
    entries_.clear();
    throw;
  }
  ++owner.unsettled_;
  owner_ = &owner;
}

std::span<const float> ErrorFeedback::Transaction::residual(std::size_t extent) const {
  return entries_.at(extent)->current.residual;
}

std::span<float> ErrorFeedback::Transaction::next(std::size_t extent) {
  return entries_.at(extent)->next.residual;
}

Adapted& ErrorFeedback::Transaction::adapted(std::size_t extent) {
  return entries_.at(extent)->next.adapted;
}

std::uint64_t ErrorFeedback::Transaction::number(std::size_t extent) const {
  const Entry& entry = *entries_.at(extent);
  return entry.name_digest ^ entry.current.calls;
}

std::span<const float> ErrorFeedback::Transaction::memory(std::size_t extent) const {
  return entries_.at(extent)->current.memory;
}

std::vector<float>& ErrorFeedback::Transaction::next_memory(std::size_t extent) {
  entries_.at(extent)->remembers = true;
  return entries_.at(extent)->next.memory;
}

void ErrorFeedback::Transaction::settle(bool keep) noexcept { close(/*of_step=*/true, keep); }

void ErrorFeedback::Transaction::cancel() noexcept { close(/*of_step=*/false, /*keep=*/false); }

void ErrorFeedback::Transaction::close(bool of_step, bool keep) noexcept {
  if (owner_ == nullptr) return;
  const std::lock_guard lock(owner_->mutex_);
  --owner_->unsettled_;
  if (of_step && owner_->in_step_) {
    owner_->spoiled_ = owner_->spoiled_ || !keep;
    owner_->of_step_.insert(owner_->of_step_.end(), entries_.begin(), entries_.end());
  } else {
    owner_->close(entries_, keep);
  }
  owner_ = nullptr;
  entries_.clear();
}

// Under the mutex, like open() and require_closed().
void ErrorFeedback::close(const std::vector<Entry*>& entries, bool keep) noexcept {
  for (Entry* entry : entries) {
    entry->open = false;
    if (!keep) continue;
    entry->current.residual.swap(entry->next.residual);
    entry->current.adapted = entry->next.adapted;
    ++entry->current.calls;
    if (entry->remembers) entry->current.memory.swap(entry->next.memory);
  }
}

void ErrorFeedback::open(const KeyedExtent& extent, std::vector<Entry*>& opened) {
  Entry& entry = entries_[extent.key];
  check_closed(extent.key, entry.open);
  check_length(extent.key, entry.current.residual.size(), extent.count);
  entry.next.residual.resize(extent.count);
  entry.next.adapted = {.tau = entry.current.adapted.tau, .filter = entry.current.adapted.filter};
  entry.name_digest = Fnv1a().text(extent.key).digest();
  entry.open = true;
  entry.remembers = false;
  opened.push_back(&entry);
}

void ErrorFeedback::begin_step() {
  const std::lock_guard lock(mutex_);
  if (in_step_) throw InvalidArgument("error feedback: end the step before you begin another");
  if (unsettled_ > 0)
    throw InvalidArgument("error feedback: a call is unfinished; wait for it before a step begins");
  in_step_ = true;
  spoiled_ = false;
}

bool ErrorFeedback::end_step(bool keep) {
  const std::lock_guard lock(mutex_);
  if (!in_step_) throw InvalidArgument("error feedback: no step was begun");
  if (unsettled_ > 0)
    throw InvalidArgument("error feedback: a call is unfinished; wait for it before the step ends");
  keep = keep && !spoiled_;
  close(of_step_, keep);
  of_step_.clear();
  in_step_ = false;
  return keep;
}

void ErrorFeedback::spoil_step() noexcept {
  const std::lock_guard lock(mutex_);
  spoiled_ = in_step_;
}

std::vector<float> ErrorFeedback::residual(const std::string& key) const {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(key);
  return found == entries_.end() ? std::vector<float>() : found->second.current.residual;
}

void ErrorFeedback::mask(const std::string& key, std::span<float> values) const {
  const FloatEnvironment environment;
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(key);
  if (found == entries_.end() || found->second.current.residual.empty()) {
    std::ranges::fill(values, 0.0F);
    return;
  }
  const std::vector<float>& residual = found->second.current.residual;
  check_length(key, residual.size(), values.size());
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = residual[i] == 0 ? 0.0F : values[i];
}

void ErrorFeedback::add(const std::string& key, std::span<const float> values) {
  const FloatEnvironment environment;
  const std::lock_guard lock(mutex_);
  Entry& entry = entries_[key];
  check_closed(key, entry.open);
  const std::vector<float>& residual = entry.current.residual;
  check_length(key, residual.size(), values.size());
  std::vector<float>& sum = entry.next.residual;
  sum.assign(values.begin(), values.end());
  for (std::size_t i = 0; i < residual.size(); ++i) sum[i] += residual[i];
  check_finite(key, sum, "with what is added the residual of key");
  entry.current.residual.swap(sum);
}

void ErrorFeedback::require_closed() const {
  for (const auto& [key, entry] : entries_) check_closed(key, entry.open);
}

void ErrorFeedback::scale(double factor) {
  if (!std::isfinite(factor))
    throw InvalidArgument("error feedback: scale by " + std::to_string(factor) +
                          " would lose every residual; use clear() for that");
  const FloatEnvironment environment;
  const std::lock_guard lock(mutex_);
  require_closed();
  for (auto& [key, entry] : entries_) {
    const std::vector<float>& residual = entry.current.residual;
    std::vector<float>& product = entry.next.residual;
    product.resize(residual.size());
    for (std::size_t i = 0; i < residual.size(); ++i)
      product[i] = static_cast<float>(residual[i] * factor);
    check_finite(key, product, "so scaled the residual of key");
  }
  for (auto& [key, entry] : entries_) {
    entry.current.residual.swap(entry.next.residual);
    Adapted& adapted = entry.current.adapted;
    adapted = {.tau = scaled(adapted.tau, factor), .filter = scaled(adapted.filter, factor)};
  }
}

void ErrorFeedback::clear() {
  const std::lock_guard lock(mutex_);
  require_closed();
  entries_.clear();
}

ErrorFeedback::Kept ErrorFeedback::take(const std::string& key) {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(key);
  if (found == entries_.end()) return {};
  check_closed(key, found->second.open);
  Kept kept = std::move(found->second.current);
  entries_.erase(found);
  return kept;
}

void ErrorFeedback::put(const std::string& key, Kept kept) {
  check_kept(key, kept);
  const std::lock_guard lock(mutex_);
  Entry& entry = entries_[key];
  check_closed(key, entry.open);
  entry.current = std::move(kept);
}

std::vector<KeyedExtent> ErrorFeedback::keys() const {
  const std::lock_guard lock(mutex_);
  std::vector<KeyedExtent> all;
  for (const auto& [key, entry] : entries_)
    if (!entry.current.residual.empty()) all.push_back({key, entry.current.residual.size()});
  return all;
}

ErrorFeedback::State ErrorFeedback::save() const {
  const std::lock_guard lock(mutex_);
  State state;
  for (const auto& [key, entry] : entries_) {
    const Kept& kept = entry.current;
    const bool unused = kept.calls == 0 && kept.residual.empty() && kept.memory.empty();
    if (!unused) state.emplace(key, kept);
  }
  return state;
}

void ErrorFeedback::load(State state) {
  for (const auto& [key, kept] : state) check_kept(key, kept);
  std::map<std::string, Entry> loaded;
  for (auto& [key, kept] : state) loaded[key].current = std::move(kept);
  const std::lock_guard lock(mutex_);
  require_closed();
  entries_.swap(loaded);
}

}  // namespace gradwire::codec
