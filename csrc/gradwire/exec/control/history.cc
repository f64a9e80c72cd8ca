#include "gradwire/exec/control/history.h"

#include <utility>

namespace gradwire::exec {
namespace {

std::uint32_t fold(std::uint64_t digest) noexcept {
  return static_cast<std::uint32_t>(digest ^ (digest >> 32));
}

std::uint32_t fingerprint_of(const Plan& plan, const CallShape& shape) noexcept {
  return plan.fingerprint() ^ fold(shape.digest);
}

}  // namespace

std::string CallHistory::Record::text() const {
  return shape.empty() ? plan->text() : plan->text() + " of shape " + shape;
}

void CallHistory::add(std::shared_ptr<const Plan> plan, const CallShape& shape) {
  const std::uint32_t fingerprint = fingerprint_of(*plan, shape);
  digest_ = (digest_ ^ fingerprint) * 0x100000001b3ULL + 1;
  Record& record = records_[calls_++ % kKept];
  record.digest = digest_;
  record.fingerprint = fingerprint;
  record.plan = std::move(plan);
  record.shape.assign(shape.text);
}

std::uint32_t CallHistory::fingerprint_of_next(const Plan& plan,
                                               const CallShape& shape) const noexcept {
  return fingerprint_of(plan, shape) ^ fold(digest_);
}

const CallHistory::Record* CallHistory::after(std::uint32_t calls) const noexcept {
  const std::uint32_t ago = calls_ - calls;
  const Record& record = records_[(calls - 1) % kKept];
  return ago < kKept && record.plan ? &record : nullptr;
}

bool SeenShapes::add(std::uint64_t digest) noexcept {
  std::uint64_t& place = seen_[digest % seen_.size()];
  const bool first = place != digest;
  place = digest;
  return first;
}

}  // namespace gradwire::exec
