// Waiting: what a thread does between two looks at what another thread or process will do.
#pragma once

#include <algorithm>
#include <chrono>
#include <optional>

namespace gradwire {

// Yields the core to its other hardware thread for a moment. A compiler barrier, too.
inline void pause_spinning() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// How many times a waiting thread yields at most, after it has spun and before it sleeps.
inline constexpr unsigned kYields = 20;

// How often a thread spins and yields before it sleeps: half as often after each long wait, for
// what takes longer than that; as often as it may after a short one.
class Backoff {
 public:
  unsigned spins(unsigned most) const noexcept { return most >> halvings_; }
  // Where ranks share cores (`most_spins` is 0) they always yield: sleep takes longer.
  unsigned yields(unsigned most_spins) const noexcept {
    return most_spins == 0 ? kYields : kYields >> halvings_;
  }
  // Must be called before each sleep.
  void sleeps() noexcept {
    if (!sleeps_since_) sleeps_since_ = Clock::now();
  }
  // Must be called where something has moved.
  void moved() noexcept {
    if (!sleeps_since_) return;
    const bool quick = Clock::now() - *sleeps_since_ < kQuick;
    halvings_ = quick ? 0 : std::min(halvings_ + 1, kMostHalvings);
    sleeps_since_.reset();
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::microseconds kQuick{100};  // it takes 10 to sleep and to wake
  static constexpr unsigned kMostHalvings = 7;             // nothing is left of 100
  unsigned halvings_ = 0;
  std::optional<Clock::time_point> sleeps_since_;  // nothing has moved since
};

}  // namespace gradwire
