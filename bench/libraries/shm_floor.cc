// What this machine allows: an all_reduce through shared memory with nothing around it, and how
// long a cache line travels between two cores. peers.py compiles it and calls it by ctypes.
//
//     c++ -std=c++20 -O3 -march=native -shared -fPIC -o shm_floor.so bench/libraries/shm_floor.cc
//
// Sum of float32 in slices of 256 KiB. Of each slice a rank stages the parts that others add up,
// adds up its own part into a result slot, and fetches the others' results: three steps, each
// waiting for the other ranks' step before. Four slices are under way. No checks, no codecs.
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

namespace {

void pause_spinning() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

constexpr std::size_t kLine = 64;          // bytes
constexpr std::size_t kSlice = 64 * 1024;  // elements
constexpr std::size_t kUnderWay = 4;       // slices
constexpr int kSpins = 200;                // before a rank yields its core
constexpr int kMostRanks = 64;
constexpr std::size_t kStaging = kUnderWay * kSlice;

struct alignas(kLine) Count {
  std::atomic<std::uint64_t> slices{0};
};

// How far a rank is, over all calls.
struct Progress {
  Count staged, added, fetched;
};

struct Shared {
  std::array<Progress, kMostRanks> ranks;
  // Then, of each rank, what it staged and what it added up.
  float* staging(int rank) noexcept {
    return reinterpret_cast<float*>(this + 1) + 2 * kStaging * static_cast<std::size_t>(rank);
  }
};

struct Part {
  std::size_t first, last;
};

Part part_of(std::size_t count, int ranks, int rank) {
  const std::size_t each = (count + static_cast<std::size_t>(ranks) - 1) / ranks;
  return {std::min(count, each * static_cast<std::size_t>(rank)),
          std::min(count, each * static_cast<std::size_t>(rank + 1))};
}

// `own` and `result` become own + others[0] + others[1] + …
template <int others_count>
void add_up(float* own, float* result, const float* const* others, Part part) {
  for (std::size_t i = part.first; i < part.last; ++i) {
    float sum = own[i];
    for (int k = 0; k < others_count; ++k) sum += others[k][i];
    own[i] = result[i] = sum;
  }
}

using AddUp = void (*)(float*, float*, const float* const*, Part);

AddUp adder_of(int ranks) {
  constexpr std::array<AddUp, 9> kAdders = {nullptr,   nullptr,   add_up<1>, add_up<2>, add_up<3>,
                                            add_up<4>, add_up<5>, add_up<6>, add_up<7>};
  return kAdders[static_cast<std::size_t>(ranks)];
}

class Floor {
 public:
  Floor(void* memory, int rank, int ranks)
      : shared_(*static_cast<Shared*>(memory)), rank_(rank), ranks_(ranks), add_(adder_of(ranks)) {}

  void all_reduce(float* x, std::size_t count) {
    const std::size_t slices = (count + kSlice - 1) / kSlice;
    std::size_t staged = 0, added = 0, fetched = 0;
    int idle = 0;
    while (fetched < slices) {
      if (staged < slices && staged < fetched + kUnderWay && may_stage(staged)) {
        stage(x, count, staged++);
      } else if (added < staged && all_have(&Progress::staged, added)) {
        add(x, count, added++);
      } else if (fetched < added && all_have(&Progress::added, fetched)) {
        fetch(x, count, fetched++);
      } else if (++idle > kSpins) {
        idle = 0;
        ::sched_yield();
      } else {
        pause_spinning();
      }
    }
    before_ += slices;
  }

 private:
  bool all_have(Count Progress::* step, std::size_t slice) const {
    for (int r = 0; r < ranks_; ++r)
      if ((shared_.ranks[r].*step).slices.load(std::memory_order_acquire) <= before_ + slice)
        return false;
    return true;
  }
  bool may_stage(std::size_t slice) const {
    return before_ + slice < kUnderWay || all_have_fetched(before_ + slice - kUnderWay);
  }
  bool all_have_fetched(std::uint64_t slice) const {
    for (int r = 0; r < ranks_; ++r)
      if (shared_.ranks[r].fetched.slices.load(std::memory_order_acquire) <= slice) return false;
    return true;
  }
  void tell(Count Progress::* step, std::size_t slice) {
    (shared_.ranks[rank_].*step).slices.store(before_ + slice + 1, std::memory_order_release);
  }
  float* slot(int rank, std::size_t slice) const {
    return shared_.staging(rank) + (before_ + slice) % kUnderWay * kSlice;
  }
  float* result(int rank, std::size_t slice) const { return slot(rank, slice) + kStaging; }
  static std::size_t elements(std::size_t count, std::size_t slice) {
    return std::min(kSlice, count - slice * kSlice);
  }

  void stage(const float* x, std::size_t count, std::size_t slice) {
    for (int r = 0; r < ranks_; ++r)
      if (r != rank_) copy(slot(rank_, slice), x + slice * kSlice, part(count, slice, r));
    tell(&Progress::staged, slice);
  }
  void add(float* x, std::size_t count, std::size_t slice) {
    std::array<const float*, kMostRanks> others;
    for (int k = 1; k < ranks_; ++k) others[k - 1] = slot((rank_ + k) % ranks_, slice);
    add_(x + slice * kSlice, result(rank_, slice), others.data(), part(count, slice, rank_));
    tell(&Progress::added, slice);
  }
  void fetch(float* x, std::size_t count, std::size_t slice) {
    for (int r = 0; r < ranks_; ++r)
      if (r != rank_) copy(x + slice * kSlice, result(r, slice), part(count, slice, r));
    tell(&Progress::fetched, slice);
  }
  Part part(std::size_t count, std::size_t slice, int rank) const {
    return part_of(elements(count, slice), ranks_, rank);
  }
  static void copy(float* to, const float* from, Part part) {
    std::memcpy(to + part.first, from + part.first, (part.last - part.first) * sizeof(float));
  }

  Shared& shared_;
  int rank_, ranks_;
  AddUp add_;
  std::uint64_t before_ = 0;  // slices, in earlier calls
};

void pin_to(int core) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(core, &cores);
  ::sched_setaffinity(0, sizeof cores, &cores);
}

}  // namespace

extern "C" {

std::size_t floor_bytes(int ranks) {
  return sizeof(Shared) + 2 * kStaging * sizeof(float) * static_cast<std::size_t>(ranks);
}

// Of a rank, from 2 to 8 of which share the memory, which is zero at first. Never freed.
void* floor_join(int memory, int rank, int ranks) {
  void* base = ::mmap(nullptr, floor_bytes(ranks), PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
  return base == MAP_FAILED ? nullptr : new Floor(base, rank, ranks);
}

void floor_all_reduce(void* floor, float* x, std::size_t count) {
  static_cast<Floor*>(floor)->all_reduce(x, count);
}

// Nanoseconds from core to core and back, of one cache line: the median of many.
double line_round_trip(int here, int there) {
  constexpr std::uint32_t kTrips = 64, kSamples = 101;
  Count line;
  auto wait_for = [&](std::uint64_t value) {
    while (line.slices.load(std::memory_order_acquire) != value) pause_spinning();
  };
  std::array<double, kSamples> samples;
  auto ask = [&] {
    pin_to(here);
    std::uint64_t value = 0;
    for (double& sample : samples) {
      const auto start = std::chrono::steady_clock::now();
      for (std::uint32_t trip = 0; trip < kTrips; ++trip, value += 2) {
        line.slices.store(value + 1, std::memory_order_release);
        wait_for(value + 2);
      }
      sample = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start)
                   .count() /
               kTrips;
    }
  };
  auto answer = [&] {
    pin_to(there);
    for (std::uint64_t value = 0; value < 2 * kTrips * kSamples; value += 2) {
      wait_for(value + 1);
      line.slices.store(value + 2, std::memory_order_release);
    }
  };
  std::thread asking(ask), answering(answer);
  asking.join();
  answering.join();
  std::ranges::nth_element(samples, samples.begin() + kSamples / 2);
  return samples[kSamples / 2];
}
}
