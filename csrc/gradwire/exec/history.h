// CallHistory: the last collectives of a rank, and a digest of all that it ever began. Ranks that
// made the same calls in the same order have the same digest, whoever they exchanged data with.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "gradwire/exec/plan.h"

namespace gradwire::exec {

class CallHistory {
 public:
  static constexpr std::uint32_t kKept = 64;  // calls

  struct Entry {
    std::uint64_t digest = 0;  // of the fingerprints of all calls up to this one
    std::shared_ptr<const Plan> plan;
  };

  void add(std::shared_ptr<const Plan> plan);

  std::uint32_t calls() const noexcept { return calls_; }
  // After the first `calls` calls; null where the last of these is not begun, or too long ago.
  const Entry* after(std::uint32_t calls) const noexcept;

 private:
  std::uint32_t calls_ = 0;  // modulo 2^32
  std::uint64_t digest_ = 0;
  std::array<Entry, kKept> entries_;
};

}  // namespace gradwire::exec
