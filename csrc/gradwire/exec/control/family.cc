#include "gradwire/exec/control/family.h"

#include <algorithm>
#include <utility>

namespace gradwire::exec {

void Family::join(Member& member) {
  auto entry = std::make_shared<Entry>();
  entry->member = &member;
  const std::lock_guard lock(mutex_);
  entries_.push_back(std::move(entry));
}

void Family::leave(Member& member) noexcept {
  std::shared_ptr<Entry> left;
  {
    const std::lock_guard lock(mutex_);
    const auto at = std::ranges::find(entries_, &member, [](const auto& e) { return e->member; });
    if (at == entries_.end()) return;
    left = std::move(*at);
    entries_.erase(at);
  }
  const std::lock_guard unused(left->in_use);
  left->member = nullptr;
}

void Family::fail_others(const Member& failed, const Identity& identity,
                         const transport::ControlFrame& failure) {
  for (const auto& entry : entries()) {
    const std::lock_guard used(entry->in_use);
    if (entry->member != nullptr && entry->member != &failed)
      entry->member->fail_as(failure, identity);
  }
}

void Family::set_wait(const Member& member, Rank job_rank) noexcept {
  const std::lock_guard lock(mutex_);
  for (const auto& entry : entries_)
    if (entry->member == &member) entry->waits_for = job_rank;
}

Rank Family::awaited_by_others(const Member& member) const noexcept {
  const std::lock_guard lock(mutex_);
  for (const auto& entry : entries_)
    if (entry->member != &member && entry->waits_for != kNoPeer) return entry->waits_for;
  return kNoPeer;
}

bool Family::serve_others(const Member& waiting) {
  bool asked = false;
  for (const auto& entry : entries()) {
    const std::unique_lock used(entry->in_use, std::try_to_lock);
    if (used && entry->member != nullptr && entry->member != &waiting)
      asked = entry->member->serve() || asked;
  }
  return asked;
}

std::vector<std::shared_ptr<Family::Entry>> Family::entries() const {
  const std::lock_guard lock(mutex_);
  return entries_;
}

}  // namespace gradwire::exec
