// Distributes the elements of a tile over threads. Where all pointers are aligned to kWide
// elements, a thread moves so many at once; else it moves single elements, and neighbouring threads
// move neighbouring elements. A thread starts all its loads before it uses any of the values.
#pragma once

#include <cstring>
#include <type_traits>

#include "gradwire/cuda/plugin/gpu.cuh"

namespace gradwire::cuda {

inline constexpr std::size_t kVector = 16;  // bytes: the most that a thread moves at once

template <typename T, unsigned kWide>
struct alignas(kWide * sizeof(T)) Neighbours {
  T at[kWide];
};

// Stores neighbours by one instruction: nvcc would split the assignment of such a struct.
template <typename T, unsigned kWide>
__device__ void store_at_once(T* to, const Neighbours<T, kWide>& few) {
#ifndef GRADWIRE_SIMULATED_CUDA
  constexpr std::size_t kBytes = sizeof(few);
  using Word =
      std::conditional_t<kBytes == 16, uint4, std::conditional_t<kBytes == 8, uint2, unsigned>>;
  if constexpr (kWide > 1 && kBytes == sizeof(Word)) {
    Word word;
    memcpy(&word, &few, kBytes);
    __stwb(reinterpret_cast<Word*>(to), word);
    return;
  }
#endif
  *reinterpret_cast<Neighbours<T, kWide>*>(to) = few;
}

// A thread's share of a tile: kCount elements for each of kThreads threads, kWide neighbours at a
// time.
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
    using Few = Neighbours<T, kWide>;
#pragma unroll
    for (unsigned i = 0; i < kCount; i += kWide) {
      const Few few = *reinterpret_cast<const Few*>(tile + element(i));
#pragma unroll
      for (unsigned k = 0; k < kWide; ++k) v[i + k] = few.at[k];
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
    using Few = Neighbours<T, kWide>;
#pragma unroll
    for (unsigned i = 0; i < kCount; i += kWide) {
      Few few;
#pragma unroll
      for (unsigned k = 0; k < kWide; ++k) few.at[k] = v[i + k];
      store_at_once(tile + element(i), few);
    }
  }
};

__host__ __device__ inline bool is_aligned(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address) % kVector == 0;
}
// Returns whether all are aligned to kVector; null counts as aligned.
template <typename... Pointers>
__host__ __device__ bool all_aligned(const Pointers*... each) {
  return (is_aligned(each) && ...);
}
__host__ __device__ inline bool is_aligned(const SpanFeedback& span_feedback) {
  return all_aligned(span_feedback.residual[0], span_feedback.residual[1]);
}

}  // namespace gradwire::cuda
