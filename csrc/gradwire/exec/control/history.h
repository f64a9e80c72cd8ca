// CallHistory: the last collectives that a rank has begun, and a digest of all of them. Ranks that
// made the same calls in the same order have the same digest, whatever data they exchanged.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "gradwire/exec/plan/plan.h"

namespace gradwire::exec {

// The shapes of a call's arrays, where ranks compare them; a digest of 0 means that they do not.
struct CallShape {
  std::uint64_t digest = 0;
  std::string_view text;
};

class CallHistory {
 public:
  static constexpr std::uint32_t kKept = 64;  // calls

  struct Record {
    std::uint64_t digest = 0;       // of the fingerprints of all calls up to this one
    std::uint32_t fingerprint = 0;  // of this call
    std::shared_ptr<const Plan> plan;
    std::string shape;  // empty if it is not compared

    std::string text() const;  // for messages
  };

  void add(std::shared_ptr<const Plan> plan, const CallShape& shape = {});

  std::uint32_t calls() const noexcept { return calls_; }
  // Returns the fingerprint for the frames of the call that is added next: it covers this call and
  // all before it.
  std::uint32_t fingerprint_of_next(const Plan& plan, const CallShape& shape) const noexcept;
  // Returns the record of call `calls - 1`; null if it has not begun, or is no longer kept.
  const Record* after(std::uint32_t calls) const noexcept;

 private:
  std::uint32_t calls_ = 0;  // modulo 2^32
  std::uint64_t digest_ = 0;
  std::array<Record, kKept> records_;
};

// The shapes of earlier calls, by their digests: the same on ranks that made the same calls. Of
// more than 1024 some are forgotten.
class SeenShapes {
 public:
  // Adds a digest. Returns whether it is new; 0 never is.
  bool add(std::uint64_t digest) noexcept;

 private:
  std::array<std::uint64_t, 1024> seen_{};
};

}  // namespace gradwire::exec
