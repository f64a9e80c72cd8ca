// Sums of several 16-bit floats on one rank, which are formed in float32 and rounded once.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace gradwire::exec {

// What to do when an addend arrives.
struct WideFold {
  static constexpr std::uint32_t kNone = ~0U;
  std::uint32_t place = kNone;  // of the sum; kNone: this addend is folded and rounded by itself
  bool begins = false;          // first addend: this rank's own elements are added too
  bool ends = false;            // last addend: the sum is rounded into this rank's elements
  bool averages = false;        // and divided before that
};

// The rounds of a schedule in which a rank's chunk gets addends (ascending), is sent, or is
// replaced.
struct ChunkRounds {
  std::vector<int> added, sent, replaced;
};

// Returns one fold per addend, in the order of arrival. Addends between which the chunk is neither
// sent nor replaced make one sum; its place is 0 until the plan finds a real one. `averages`: the
// last sum is divided.
std::vector<WideFold> wide_folds(const ChunkRounds& rounds, bool averages);

// Assigns places to unfinished sums. A finished sum gives its place to another.
class WidePlaces {
 public:
  std::uint32_t take();
  void give_back(std::uint32_t place) { unused_.push_back(place); }
  std::uint32_t most() const noexcept { return most_; }

 private:
  std::vector<std::uint32_t> unused_;
  std::uint32_t most_ = 0;
};

}  // namespace gradwire::exec
