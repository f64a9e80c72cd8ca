// What threshold and topk share (codec/sparse.h). A thread block works on one unit of elements; a
// mask with one bit per element tells its threads which elements are sent.
#pragma once

#include "gradwire/codec/sparse.h"
#include "gradwire/cuda/plugin/batch.cuh"
#include "gradwire/cuda/plugin/bits.cuh"
#include "gradwire/cuda/plugin/span_feedback.cuh"

namespace gradwire::cuda {

inline constexpr unsigned kUnit = codec::kSparseBlock;
inline constexpr unsigned kUnitThreads = 1024;
inline constexpr unsigned kUnitWords = kUnit / kWarp;
inline constexpr unsigned kUnitSteps = kUnit / kUnitThreads;
static_assert(kUnitWords == kUnitThreads);  // each thread handles one word of the mask

// In step s, thread t handles element s · kUnitThreads + t: bit t % kWarp of word mask_word(s).
__device__ inline unsigned element_of(unsigned step) { return step * kUnitThreads + threadIdx.x; }
// Returns in how many steps this thread has one of the first n elements.
__device__ inline unsigned steps_of(unsigned n) {
  return n <= threadIdx.x ? 0 : (n - threadIdx.x + kUnitThreads - 1) / kUnitThreads;
}
__device__ inline unsigned mask_word(unsigned step) {
  return step * (kUnitThreads / kWarp) + threadIdx.x / kWarp;
}
__device__ inline bool has_bit(std::uint32_t word) {
  return (word >> (threadIdx.x % kWarp) & 1U) != 0;
}
// Returns how many bits of the word are set below this thread's bit.
__device__ inline unsigned bits_before(std::uint32_t word) {
  return static_cast<unsigned>(__popc(word & ((1U << (threadIdx.x % kWarp)) - 1)));
}

constexpr std::uint64_t units_of(std::uint64_t n) { return blocks_for(n, kUnit); }

__device__ inline unsigned unit_length(std::uint64_t n, std::uint64_t unit) {
  const std::uint64_t left = n - unit * kUnit;
  return left < kUnit ? static_cast<unsigned>(left) : kUnit;
}

// Where there are too few units for all multiprocessors, blocks share a unit in the pass over x and
// e: each takes a part of it, of kPartSteps steps. Another kernel then writes payloads.
inline constexpr unsigned kPartSteps = 4;
inline constexpr unsigned kParts = kUnitSteps / kPartSteps;

constexpr bool are_shared(std::uint64_t units) { return units <= kEnoughBlocks; }
// Returns how many units share their blocks at once, of those of a call.
constexpr std::uint64_t shared_units(std::uint64_t units) {
  return units < kEnoughBlocks ? units : kEnoughBlocks;
}

// Returns the bytes of the table of sizes in front of a span's slots.
constexpr std::uint64_t sparse_table_bytes(std::uint64_t n) {
  return aligned(sizeof(std::uint32_t) * units_of(n));
}

inline std::uint64_t units_of_span(const GpuSpan& span) { return units_of(span.n); }

// Loads one unit of v = x + residual, which may be null.
struct BlockSource {
  const float* x;
  const float* residual;
  unsigned n;
  unsigned steps;  // of this thread

  __device__ BlockSource(const float* all_x, const float* all_residual, std::uint64_t all,
                         std::uint64_t unit)
      : x(all_x + unit * kUnit),
        residual(all_residual == nullptr ? nullptr : all_residual + unit * kUnit),
        n(unit_length(all, unit)),
        steps(steps_of(n)) {}

  // Loads this thread's elements of kSteps steps; 0 beyond the end. Several loads start before a
  // value is used.
  template <unsigned kSteps>
  __device__ void load(unsigned first_step, float (&v)[kSteps]) const {
    constexpr unsigned kAtOnce = kSteps < 8 ? kSteps : 8;
#pragma unroll
    for (unsigned s = 0; s < kSteps; s += kAtOnce) load_some<kAtOnce>(first_step + s, v + s);
  }

 private:
  template <unsigned kSteps>
  __device__ void load_some(unsigned first_step, float* v) const {
    float r[kSteps];
#pragma unroll
    for (unsigned s = 0; s < kSteps; ++s) v[s] = at(x, first_step + s);
    if (residual == nullptr) return;
#pragma unroll
    for (unsigned s = 0; s < kSteps; ++s) r[s] = at(residual, first_step + s);
#pragma unroll
    for (unsigned s = 0; s < kSteps; ++s) v[s] += r[s];
  }
  __device__ float at(const float* from, unsigned step) const {
    return step < steps ? from[element_of(step)] : 0;
  }
};

// Returns how many of n elements a density stands for (codec::share_of).
__host__ __device__ inline std::uint64_t share_of(double density, std::uint64_t n) {
  const auto share = static_cast<std::uint64_t>(density * static_cast<double>(n) + 0.5);
  return share < 1 ? 1 : share > n ? n : share;
}

// What one launch of an encoder works on.
struct SparseSpans {
  Batch<GpuSpan> spans;
  std::byte* out;  // the message
  std::uint64_t slot_bytes;
  double density;
  float tau;    // threshold: as given; 0: the call's, or the unit's
  float* taus;  // threshold: of each unit, where the call has none
};

// Calls start(of) for each launch of an encoder.
template <typename Start>
Status in_sparse_batches(SparseSpans of, const GpuSpan* spans, int count, Start start) {
  return in_batches(spans, count, units_of_span, [&](const Batch<GpuSpan>& batch) {
    of.spans = batch;
    const Status status = start(of);
    if (of.taus != nullptr) of.taus += batch.tiles();
    return status;
  });
}

// A unit that is encoded.
struct SparseUnit {
  const SparseSpans& of;
  const Tile<GpuSpan>& tile;

  __device__ const SpanFeedback& feedback() const { return tile.span.span_feedback; }
  __device__ BlockSource source() const {
    return BlockSource(tile.span.x, residual_of(feedback()), tile.span.n, tile.number);
  }
  // Returns e' of the unit; null where no errors are kept.
  __device__ float* error() const {
    float* const errors = next_residual(feedback());
    return errors == nullptr ? nullptr : errors + tile.number * kUnit;
  }
  __device__ unsigned share(unsigned length) const {
    return static_cast<unsigned>(share_of(of.density, length));
  }
  __device__ std::byte* slot() const {
    return of.out + tile.span.payload + sparse_table_bytes(tile.span.n) +
           tile.number * of.slot_bytes;
  }
  __device__ void write_size(unsigned bytes) const {
    reinterpret_cast<std::uint32_t*>(of.out + tile.span.payload)[tile.number] = bytes;
  }
};

// Calls body(unit, its number through all spans, part) for each part that falls to the block, where
// blocks share units.
template <typename Body>
__device__ void each_part(const SparseSpans& of, Body body) {
  for (std::uint64_t i = blockIdx.x; i < of.spans.tiles() * kParts; i += gridDim.x)
    of.spans.at_tile(i / kParts, [&](Tile<GpuSpan> tile) {
      body(SparseUnit{of, tile}, i / kParts, static_cast<unsigned>(i % kParts));
    });
}

// ---- Payloads under construction in shared memory ----------------------------------------------

__device__ inline void clear(std::uint32_t* words, unsigned count) {
  for (unsigned i = threadIdx.x; i < count; i += kUnitThreads) words[i] = 0;
}

// Copies bytes to `out`, which is aligned to a word.
__device__ inline void copy_out(const std::uint32_t* words, unsigned bytes, std::byte* out) {
  for (unsigned i = threadIdx.x; i < bytes / 4; i += kUnitThreads)
    reinterpret_cast<std::uint32_t*>(out)[i] = words[i];
  const unsigned at = bytes / 4 * 4 + threadIdx.x;
  if (at < bytes) out[at] = static_cast<std::byte>(words[at / 4] >> (at % 4 * 8));
}

inline constexpr unsigned kFormatBits = 3, kMostLowBits = 15, kShortCount = 128;

__device__ inline std::uint32_t head_of(codec::PositionFormat format, unsigned low = 0) {
  return static_cast<std::uint32_t>(format) | low << kFormatBits;
}

}  // namespace gradwire::cuda
