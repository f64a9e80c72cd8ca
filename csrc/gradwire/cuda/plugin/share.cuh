// Which elements of a tile a thread works on, and how it reads and writes them: runs of neighbours
// at once where all pointers are aligned to such a run, or else one by one, neighbours by
// neighbouring threads. All that it reads is asked for before any of it is used.
#pragma once

#include "gradwire/cuda/plugin/gpu.cuh"

namespace gradwire::cuda {

inline constexpr std::size_t kVector = 16;  // bytes, the most that a thread moves at once

template <typename T, unsigned kWide>
struct alignas(kWide * sizeof(T)) Neighbours {
  T at[kWide];
};

// kCount elements of each of kThreads threads, in runs of kWide.
template <unsigned kThreads, unsigned kCount, unsigned kWide>
struct Share {
  static constexpr unsigned kTile = kThreads * kCount;
  static_assert(kCount % kWide == 0);

  unsigned rank;  // of the thread

  __device__ unsigned element(unsigned i) const {
    return (i / kWide * kThreads + rank) * kWide + i % kWide;
  }

  // Loads a tile's first n elements; the others are zero.
  template <typename T>
  __device__ void load(const T* tile, std::uint64_t n, T (&v)[kCount]) const {
    if (n < kTile) {
#pragma unroll
      for (unsigned i = 0; i < kCount; ++i) v[i] = element(i) < n ? tile[element(i)] : T{};
      return;
    }
    using Run = Neighbours<T, kWide>;
#pragma unroll
    for (unsigned i = 0; i < kCount; i += kWide) {
      const Run run = *reinterpret_cast<const Run*>(tile + element(i));
#pragma unroll
      for (unsigned k = 0; k < kWide; ++k) v[i + k] = run.at[k];
    }
  }

  template <typename T>
  __device__ void store(T* tile, std::uint64_t n, const T (&v)[kCount]) const {
    if (n < kTile) {
#pragma unroll
      for (unsigned i = 0; i < kCount; ++i)
        if (element(i) < n) tile[element(i)] = v[i];
      return;
    }
    using Run = Neighbours<T, kWide>;
#pragma unroll
    for (unsigned i = 0; i < kCount; i += kWide) {
      Run run;
#pragma unroll
      for (unsigned k = 0; k < kWide; ++k) run.at[k] = v[i + k];
      *reinterpret_cast<Run*>(tile + element(i)) = run;
    }
  }
};

inline bool is_aligned(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address) % kVector == 0;
}
// Null is.
template <typename... Pointers>
bool all_aligned(const Pointers*... each) {
  return (is_aligned(each) && ...);
}
inline bool is_aligned(const RunFeedback& run_feedback) {
  return all_aligned(run_feedback.residual[0], run_feedback.residual[1]);
}

}  // namespace gradwire::cuda
