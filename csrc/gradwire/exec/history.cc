#include "gradwire/exec/history.h"

#include <utility>

namespace gradwire::exec {

void CallHistory::add(std::shared_ptr<const Plan> plan) {
  digest_ = (digest_ ^ plan->fingerprint()) * 0x100000001b3ULL + 1;
  entries_[calls_++ % kKept] = {digest_, std::move(plan)};
}

const CallHistory::Entry* CallHistory::after(std::uint32_t calls) const noexcept {
  const std::uint32_t ago = calls_ - calls;
  const Entry& entry = entries_[(calls - 1) % kKept];
  return ago < kKept && entry.plan ? &entry : nullptr;
}

}  // namespace gradwire::exec
