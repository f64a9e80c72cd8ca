#include "gradwire/codec/feedback.h"

#include <cmath>
#include <utility>

#include "gradwire/base/error.h"

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
  return entries_.at(extent)->adapted;
}

std::span<const float> ErrorFeedback::Transaction::memory(std::size_t extent) const {
  return entries_.at(extent)->current.memory;
}

std::vector<float>& ErrorFeedback::Transaction::next_memory(std::size_t extent) {
  entries_.at(extent)->remembers = true;
  return entries_.at(extent)->next.memory;
}

void ErrorFeedback::Transaction::settle(bool keep) noexcept {
  if (owner_ == nullptr) return;
  const std::lock_guard lock(owner_->mutex_);
  --owner_->unsettled_;
  if (owner_->in_step_) {
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
    entry->current.adapted = entry->adapted.value;
    if (entry->remembers) entry->current.memory.swap(entry->next.memory);
  }
}

void ErrorFeedback::open(const KeyedExtent& extent, std::vector<Entry*>& opened) {
  Entry& entry = entries_[extent.key];
  check_closed(extent.key, entry.open);
  check_length(extent.key, entry.current.residual.size(), extent.count);
  entry.next.residual.resize(extent.count);
  entry.adapted = {entry.current.adapted, 0};
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

std::vector<float> ErrorFeedback::residual(const std::string& key) const {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(key);
  return found == entries_.end() ? std::vector<float>() : found->second.current.residual;
}

void ErrorFeedback::add(const std::string& key, std::span<const float> values) {
  const std::lock_guard lock(mutex_);
  Entry& entry = entries_[key];
  check_closed(key, entry.open);
  std::vector<float>& residual = entry.current.residual;
  check_length(key, residual.size(), values.size());
  residual.resize(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) residual[i] += values[i];
}

void ErrorFeedback::require_closed() const {
  for (const auto& [key, entry] : entries_) check_closed(key, entry.open);
}

void ErrorFeedback::scale(double factor) {
  if (!std::isfinite(factor))
    throw InvalidArgument("error feedback: scale by " + std::to_string(factor) +
                          " would lose every residual; use clear() for that");
  const std::lock_guard lock(mutex_);
  require_closed();
  for (auto& [key, entry] : entries_) {
    for (float& value : entry.current.residual) value = static_cast<float>(value * factor);
    entry.current.adapted = static_cast<float>(entry.current.adapted * std::fabs(factor));
  }
}

void ErrorFeedback::clear() {
  const std::lock_guard lock(mutex_);
  require_closed();
  entries_.clear();
}

std::vector<KeyedExtent> ErrorFeedback::keys() const {
  const std::lock_guard lock(mutex_);
  std::vector<KeyedExtent> all;
  for (const auto& [key, entry] : entries_)
    if (!entry.current.residual.empty()) all.push_back({key, entry.current.residual.size()});
  return all;
}

ErrorFeedback::Kept ErrorFeedback::save(const std::string& key) const {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(key);
  return found == entries_.end() ? Kept() : found->second.current;
}

void ErrorFeedback::load(const std::string& key, Kept kept) {
  const std::lock_guard lock(mutex_);
  Entry& entry = entries_[key];
  check_closed(key, entry.open);
  entry.current = std::move(kept);
}

}  // namespace gradwire::codec
