// Totals: what a rank's calls, messages and failures add up to, for metrics. All memory is
// allocated at the start, but for the names of codecs. One thread at a time adds, and any may read.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gradwire/exec/plan/request.h"
#include "gradwire/transport/control.h"

namespace gradwire::exec {

// A counter with one writer at a time, which therefore needs no locked instruction.
class Count {
 public:
  void add(std::uint64_t more) noexcept { value_.store(value_ + more, std::memory_order_relaxed); }
  std::uint64_t read() const noexcept { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> value_{0};
};

class Totals {
 public:
  static constexpr std::size_t kMostSeries = 128;

  // The calls of one collective with one codec.
  struct Calls {
    Count calls, failed, nanoseconds;
    Count input_bytes;  // of the caller's arrays
    Count sent_bytes;   // headers included
  };
  struct Peer {
    Count sent_bytes, received_bytes;  // headers included, messages too
    Count sends, receives;             // messages of send and recv
    Count late_nanoseconds;            // in which nothing could be done before it sent
    Count full_nanoseconds;            // in which nothing could be done before it read
  };
  struct Failure {
    transport::FailureKind kind = transport::FailureKind::kOther;
    Rank job_peer = kNoPeer;
  };
  struct NamedCalls {
    Collective collective;
    std::string codec;
    const Calls* counts;
  };

  explicit Totals(int ranks) : peers(static_cast<std::size_t>(ranks)) {}

  // Returns the number of the series of calls like this one. One thread at a time calls it.
  std::uint32_t series_of(const Request& request) noexcept;
  Calls& calls(std::uint32_t series) noexcept { return calls_[series]; }
  // Returns the series in which there were calls.
  std::vector<NamedCalls> calls() const;
  void fail(const Failure& failure) noexcept;  // once: a failure is final
  std::optional<Failure> failure() const noexcept;

  std::vector<Peer> peers;  // by rank

 private:
  // First without a codec, by collective; then with codecs for which there was no room; then one
  // for each codec that was met.
  static constexpr std::size_t kNamed = 2 * std::size_t{kCollectives};
  struct Name {
    Collective collective = Collective::kAllReduce;
    std::string codec;
  };

  std::array<Calls, kMostSeries> calls_;
  std::array<Name, kMostSeries - kNamed> names_;
  std::atomic<std::size_t> named_{0};
  std::atomic<std::uint64_t> failure_{0};  // the kind, and above it the job's rank and 1
};

}  // namespace gradwire::exec
