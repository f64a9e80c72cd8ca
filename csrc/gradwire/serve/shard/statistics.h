// Counters of a shard, which `server.stats()` returns as JSON.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace gradwire::serve {

struct Statistics {
  static constexpr std::size_t kMostStaleness = 255;  // the last bin counts all above it, too
  static constexpr std::size_t kMostGone = 64;        // older ones are dropped

  std::uint64_t pushes = 0;      // applied
  std::uint64_t partial = 0;     // incomplete pushes that were dropped
  std::uint64_t stale = 0;       // refused
  std::uint64_t not_finite = 0;  // refused, or cut short
  std::uint64_t pulls = 0;
  std::uint64_t received = 0, sent = 0;                       // bytes of frames
  std::array<std::uint64_t, kMostStaleness + 1> staleness{};  // pushes by their staleness
  double sum_of_staleness = 0;
  std::uint64_t most_staleness = 0;
  std::uint64_t last_batch = 0;   // of Vectors; 0 without
  std::vector<std::string> gone;  // clients that ended without a goodbye, and why

  void count_staleness(std::uint64_t versions);
  void count_gone(std::string client);
  // `clients`: the names of those that are joined.
  std::string json(std::uint64_t version, const std::vector<std::string>& clients) const;
};

}  // namespace gradwire::serve
