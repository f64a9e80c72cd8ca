// Waiting: what a thread does between two looks at what another thread or process will do.
#pragma once

#include <sched.h>

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
// what takes longer than that; as often as it may after a short one. Where other programs compute
// on its core, a yield gives them milliseconds, while a sleeping thread is run once it is woken: so
// it soon sleeps there, and slow yields take a hundredth of the time at most.
class Backoff {
 public:
  unsigned spins(unsigned most) const noexcept {
    return (most >> halvings_) / (beside_others_ ? 4 : 1);
  }
  // Where ranks share cores (`most_spins` is 0) they always yield: sleep takes longer.
  unsigned yields(unsigned most_spins) const noexcept {
    if (most_spins == 0) return kYields;
    return beside_others_ ? 0 : kYields >> halvings_;
  }
  void yield() noexcept {
    const auto start = Clock::now();
    ::sched_yield();
    const auto end = Clock::now();
    if (end - start > kSlowYield) {
      beside_others_ = true;
      yields_again_ = end + 100 * (end - start);
    }
  }
  // Must be called before each sleep.
  void sleeps() noexcept {
    if (sleeps_since_) return;
    sleeps_since_ = Clock::now();
    beside_others_ = beside_others_ && *sleeps_since_ < yields_again_;
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
  static constexpr std::chrono::microseconds kSlowYield{200};
  unsigned halvings_ = 0;
  bool beside_others_ = false;
  Clock::time_point yields_again_;
  std::optional<Clock::time_point> sleeps_since_;  // nothing has moved since
};

}  // namespace gradwire
