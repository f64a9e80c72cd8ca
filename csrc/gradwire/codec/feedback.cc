#include "gradwire/codec/feedback.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "gradwire/base/error.h"
#include "gradwire/base/op.h"
#include "gradwire/codec/simd/simd.h"

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

void check_finite(const std::string& key, std::span<const float> values, const char* what) {
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

// Calls each(first, values) for all n elements of a residual, a stretch of them at a time. An empty
// one is all zero; that is −0, as x + −0 is x.
template <typename Each>
void for_stretches(const Residual& residual, std::size_t n, Each each) {
  std::array<float, 4096> room;
  for (std::size_t i = 0; i < n; i += room.size()) {
    const auto values = std::span(room).first(std::min(room.size(), n - i));
    std::ranges::fill(values, -0.0F);
    if (!residual.empty()) residual.read(i, values);
    each(i, values);
  }
}

}  // namespace

ErrorFeedback::Entry::Entry(ResidualType type, const std::string& key)
    : current(type), next(type), name_digest(Fnv1a().text(key).digest()) {}

void ErrorFeedback::Entry::put(Kept kept) {
  current.adapted = kept.adapted;
  current.calls = kept.calls;
  current.memory = std::move(kept.memory);
  current.residual.assign(std::move(kept.residual), number());
  changes = 0;
}

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

std::size_t ErrorFeedback::Transaction::size(std::size_t extent) const {
  return entries_.at(extent)->next.residual.size();
}

Site ErrorFeedback::Transaction::site(std::size_t extent) const {
  Entry& entry = *entries_.at(extent);
  Site site;
  site.call = entry.number();
  site.adapted = &entry.next.adapted;
  entry.current.residual.read_by(site);
  entry.next.residual.write_by(site);
  return site;
}

std::vector<float> ErrorFeedback::Transaction::residual(std::size_t extent) const {
  return entries_.at(extent)->current.residual.values();
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
    entry->changes = 0;
    if (entry->remembers) entry->current.memory.swap(entry->next.memory);
  }
}

void ErrorFeedback::open(const KeyedExtent& extent, std::vector<Entry*>& opened) {
  Entry& entry = this->entry(extent.key);
  check_closed(extent.key, entry.open);
  check_length(extent.key, entry.current.residual.size(), extent.count);
  entry.next.residual.resize(extent.count);
  entry.next.adapted = {.tau = entry.current.adapted.tau, .filter = entry.current.adapted.filter};
  entry.open = true;
  entry.remembers = false;
  opened.push_back(&entry);
}

ErrorFeedback::Entry& ErrorFeedback::entry(const std::string& key) {
  return entries_.try_emplace(key, type_, key).first->second;
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
  return found == entries_.end() ? std::vector<float>() : found->second.current.residual.values();
}

void ErrorFeedback::mask(const std::string& key, std::span<float> values) const {
  const FloatEnvironment environment;
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(key);
  if (found == entries_.end() || found->second.current.residual.empty()) {
    std::ranges::fill(values, 0.0F);
    return;
  }
  const Residual& residual = found->second.current.residual;
  check_length(key, residual.size(), values.size());
  for_stretches(residual, values.size(), [&](std::size_t first, std::span<float> waiting) {
    for (std::size_t i = 0; i < waiting.size(); ++i)
      if (waiting[i] == 0) values[first + i] = 0;
  });
}

void ErrorFeedback::add(const std::string& key, std::span<const float> values) {
  const FloatEnvironment environment;
  const std::lock_guard lock(mutex_);
  Entry& entry = this->entry(key);
  check_closed(key, entry.open);
  const Residual& residual = entry.current.residual;
  check_length(key, residual.size(), values.size());
  const std::uint64_t draw = entry.draw();
  entry.next.residual.resize(values.size());
  for_stretches(residual, values.size(), [&](std::size_t first, std::span<float> sum) {
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += values[first + i];
    check_finite(key, sum, "with what is added the residual of key");
    entry.next.residual.write(first, sum, draw);
  });
  entry.current.residual.swap(entry.next.residual);
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
    const Residual& residual = entry.current.residual;
    Residual& product = entry.next.residual;
    const std::uint64_t draw = entry.draw();
    product.resize(residual.size());
    for_stretches(residual, residual.size(), [&](std::size_t first, std::span<float> values) {
      for (float& each : values) each = static_cast<float>(each * factor);
      check_finite(key, values, "so scaled the residual of key");
      product.write(first, values, draw);
    });
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
  Stored& stored = found->second.current;
  Kept kept{std::move(stored.residual).values(), stored.adapted, stored.calls,
            std::move(stored.memory)};
  entries_.erase(found);
  return kept;
}

void ErrorFeedback::put(const std::string& key, Kept kept) {
  check_kept(key, kept);
  const std::lock_guard lock(mutex_);
  Entry& entry = this->entry(key);
  check_closed(key, entry.open);
  entry.put(std::move(kept));
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
    const Stored& its = entry.current;
    const bool unused = its.calls == 0 && its.residual.empty() && its.memory.empty();
    if (!unused) state[key] = {its.residual.values(), its.adapted, its.calls, its.memory};
  }
  return state;
}

void ErrorFeedback::load(State state) {
  for (const auto& [key, kept] : state) check_kept(key, kept);
  std::map<std::string, Entry> loaded;
  for (auto& [key, kept] : state)
    loaded.try_emplace(key, type_, key).first->second.put(std::move(kept));
  const std::lock_guard lock(mutex_);
  require_closed();
  entries_.swap(loaded);
}

}  // namespace gradwire::codec
