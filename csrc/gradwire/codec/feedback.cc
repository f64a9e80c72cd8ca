#include "gradwire/codec/feedback.h"

#include <cmath>

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

ErrorFeedback::Transaction::Transaction(ErrorFeedback& owner,
                                        const std::vector<KeyedExtent>& extents)
    : owner_(owner) {
  entries_.reserve(extents.size());
  try {
    for (const KeyedExtent& extent : extents) owner_.open(extent, entries_);
  } catch (...) {
    rollback();
    throw;
  }
}

ErrorFeedback::Transaction::~Transaction() { rollback(); }

std::span<const float> ErrorFeedback::Transaction::residual(std::size_t extent) const {
  return entries_.at(extent)->current;
}

std::span<float> ErrorFeedback::Transaction::next(std::size_t extent) {
  return entries_.at(extent)->next;
}

void ErrorFeedback::Transaction::commit() {
  const std::lock_guard lock(owner_.mutex_);
  for (Entry* entry : entries_) {
    entry->current.swap(entry->next);
    entry->open = false;
  }
  entries_.clear();
}

void ErrorFeedback::Transaction::rollback() noexcept {
  const std::lock_guard lock(owner_.mutex_);
  for (Entry* entry : entries_) entry->open = false;
  entries_.clear();
}

void ErrorFeedback::open(const KeyedExtent& extent, std::vector<Entry*>& opened) {
  const std::lock_guard lock(mutex_);
  Entry& entry = entries_[extent.key];
  check_closed(extent.key, entry.open);
  check_length(extent.key, entry.current.size(), extent.count);
  entry.next.assign(extent.count, 0.0F);
  entry.open = true;
  opened.push_back(&entry);
}

std::vector<float> ErrorFeedback::residual(const std::string& key) const {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(key);
  return found == entries_.end() ? std::vector<float>() : found->second.current;
}

void ErrorFeedback::add(const std::string& key, std::span<const float> values) {
  const std::lock_guard lock(mutex_);
  Entry& entry = entries_[key];
  check_closed(key, entry.open);
  check_length(key, entry.current.size(), values.size());
  entry.current.resize(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) entry.current[i] += values[i];
}

void ErrorFeedback::scale(double factor) {
  if (!std::isfinite(factor))
    throw InvalidArgument("error feedback: scale by " + std::to_string(factor) +
                          " would lose every residual; use clear() for that");
  const std::lock_guard lock(mutex_);
  for (const auto& [key, entry] : entries_) check_closed(key, entry.open);
  for (auto& [key, entry] : entries_)
    for (float& value : entry.current) value = static_cast<float>(value * factor);
}

void ErrorFeedback::clear() {
  const std::lock_guard lock(mutex_);
  for (const auto& [key, entry] : entries_) check_closed(key, entry.open);
  entries_.clear();
}

std::vector<KeyedExtent> ErrorFeedback::keys() const {
  const std::lock_guard lock(mutex_);
  std::vector<KeyedExtent> all;
  for (const auto& [key, entry] : entries_)
    if (!entry.current.empty()) all.push_back({key, entry.current.size()});
  return all;
}

}  // namespace gradwire::codec
