// lowrank: the kernels on factors alone, between the passes over matrices (codec/lowrank.h).
#include "gradwire/codec/factors.h"

#include <vector>

#include "gradwire/codec/splitmix64.h"
#include "gradwire/cuda/plugin/batch.cuh"
#include "gradwire/cuda/plugin/block.cuh"
#include "gradwire/cuda/plugin/floats.cuh"
#include "gradwire/cuda/plugin/functions.h"
#include "gradwire/cuda/plugin/gpu.cuh"
#include "gradwire/cuda/plugin/span_feedback.cuh"

namespace gradwire::cuda {
namespace {

constexpr unsigned kThreads = 1024;

// ---- start_factor: one block per column ---------------------------------------------------------

__device__ float drawn(std::uint64_t k, std::uint64_t j) {
  const std::uint64_t word = codec::splitmix64((k << 32 | j) * codec::kSplitMix64Step);
  const auto bits = static_cast<std::int32_t>(word >> 41);
  return static_cast<float>(2 * bits + 1 - (1 << 23)) * 0x1p-23F;
}

// Returns the least exponent for which 2^exponent is above a finite value that is not 0.
__device__ int exponent_above(std::uint32_t bits) {
  return bits >> 23 != 0 ? static_cast<int>(bits >> 23) - 126
                         : 32 - __clz(static_cast<int>(bits)) - 149;
}

__device__ double power_of_two(int exponent) {
  return __longlong_as_double(static_cast<long long>(1023 + exponent) << 52);
}

template <typename Value>
__device__ std::uint32_t largest_of(std::uint64_t n, Value value) {
  std::uint32_t most = 0;
  for (std::uint64_t j = threadIdx.x; j < n; j += blockDim.x) {
    const std::uint32_t each = magnitude_bits(value(j));
    most = each > most ? each : most;
  }
  return block_largest(most);
}

template <typename Value>
__device__ void write_scaled(std::uint32_t largest, std::uint64_t n, float* column, Value value) {
  const double factor = power_of_two(-32 - exponent_above(largest));  // kHeadroom is 2^-32
  for (std::uint64_t j = threadIdx.x; j < n; j += blockDim.x)
    column[j] = static_cast<float>(static_cast<double>(value(j)) * factor);
}
static_assert(codec::kHeadroom == 0x1p-32F);

__device__ void begin_column(const GpuMatrix& of, std::uint64_t k) {
  if (k == 0 && threadIdx.x < 2 && of.scales != nullptr) of.scales[threadIdx.x] = 0;
  const std::uint64_t columns = of.of.columns;
  const float* last = of.memory.factor[0] == nullptr
                          ? nullptr
                          : one_of(of.memory.factor, of.memory.key_state->which_memory);
  float* column = of.q + k * columns;
  if (last != nullptr) {
    const auto kept = [=](std::uint64_t j) { return last[k * columns + j]; };
    const std::uint32_t largest = largest_of(columns, kept);
    if (largest > 0 && largest < kInfinityBits) return write_scaled(largest, columns, column, kept);
  }
  const auto anew = [=](std::uint64_t j) { return drawn(k, j); };
  write_scaled(largest_of(columns, anew), columns, column, anew);
}

__global__ void __launch_bounds__(kThreads)
    begin_columns(const __grid_constant__ Batch<GpuMatrix> all) {
  all.each_tile([](Tile<GpuMatrix> tile) { begin_column(tile.span, tile.number); });
}

Status start_factor(const GpuMatrix* all, int count, Stream stream) {
  const auto tiles = [](const GpuMatrix& each) { return each.of.columns == 0 ? 0 : each.of.rank; };
  return in_batches(all, count, tiles, [stream](const Batch<GpuMatrix>& batch) {
    return launch(begin_columns, batch.tiles(), kThreads, stream, batch);
  });
}

// ---- take_headroom, check_finite, remember ------------------------------------------------------

constexpr std::uint64_t kEach = 8;                    // least elements per thread
constexpr std::uint64_t kTile = kEach * kThreads;     // elements
constexpr std::uint64_t kOfOneBlock = 32 * kThreads;  // most elements for a single pass

// The scale of factors that are too large to be multiplied by it.
constexpr float kLargeScale = 1 / codec::kHeadroom;

struct HeadroomSpan {
  float* q;
  float* scale;
  std::uint64_t n;
};

__global__ void __launch_bounds__(kThreads)
    take_out_headroom(const __grid_constant__ Batch<HeadroomSpan> spans) {
  spans.each_tile([](Tile<HeadroomSpan> tile) {
    const HeadroomSpan& span = tile.span;
    const std::uint32_t largest = largest_of(span.n, [&](std::uint64_t i) { return span.q[i]; });
    const bool large = __uint_as_float(largest) > 0x1p64F;
    for (std::uint64_t i = threadIdx.x; !large && i < span.n; i += blockDim.x)
      span.q[i] *= kLargeScale;
    if (threadIdx.x == 0) *span.scale = large ? kLargeScale : 1;
  });
}

// Returns the scale for a largest magnitude. Where that is NaN, so is the scale: as bits it is more
// than all others, so that it prevails in find_scale().
__device__ float scale_of(std::uint32_t largest) {
  if (largest > kInfinityBits) return quiet_nan<float>();
  return __uint_as_float(largest) > 0x1p64F ? kLargeScale : 1;
}

// Calls body(span, first, end) for each tile of elements of a span.
template <typename Body>
__device__ void each_tile(const Batch<HeadroomSpan>& spans, Body body) {
  spans.each_tile([&](Tile<HeadroomSpan> tile) {
    const std::uint64_t first = tile.number * kTile, n = tile.span.n;
    body(tile.span, first, n - first < kTile ? n : first + kTile);
  });
}

// Sets scales, which are 0 before, to the largest of their tiles' scale_of().
__global__ void __launch_bounds__(kThreads)
    find_scales(const __grid_constant__ Batch<HeadroomSpan> spans) {
  each_tile(spans, [](const HeadroomSpan& span, std::uint64_t first, std::uint64_t end) {
    const std::uint32_t most =
        largest_of(end - first, [&](std::uint64_t i) { return span.q[first + i]; });
    if (threadIdx.x == 0)
      atomicMax(reinterpret_cast<std::uint32_t*>(span.scale), __float_as_uint(scale_of(most)));
  });
}

// A span's first thread may replace a scale of NaN by 1 while other threads still read it. This is
// harmless: neither of the two is kLargeScale.
__global__ void __launch_bounds__(kThreads)
    multiply_by_scales(const __grid_constant__ Batch<HeadroomSpan> spans) {
  each_tile(spans, [](const HeadroomSpan& span, std::uint64_t first, std::uint64_t end) {
    auto* const scale = reinterpret_cast<std::uint32_t*>(span.scale);
    if (*scale == __float_as_uint(kLargeScale)) return;
    for (std::uint64_t i = first + threadIdx.x; i < end; i += kThreads) span.q[i] *= kLargeScale;
    if (first == 0 && threadIdx.x == 0) atomicExch(scale, __float_as_uint(1.0F));
  });
}

Status take_headroom_of_long(const std::vector<HeadroomSpan>& all, Stream stream) {
  return in_batches(
      all.data(), static_cast<int>(all.size()),
      [](const HeadroomSpan& span) { return blocks_for(span.n, kTile); },
      [stream](const Batch<HeadroomSpan>& batch) {
        const Status status = launch(find_scales, batch.tiles(), kThreads, stream, batch);
        if (status != 0) return status;
        return launch(multiply_by_scales, batch.tiles(), kThreads, stream, batch);
      });
}

Status take_headroom(const GpuMatrix* all, int count, Stream stream) {
  std::vector<HeadroomSpan> small, large;
  for (int i = 0; i < 2 * count; ++i) {
    const GpuMatrix& each = all[i / 2];
    const HeadroomSpan span{i % 2 == 0 ? each.q : each.own_q, each.scales + i % 2,
                            each.of.columns * each.of.rank};
    if (span.q != nullptr) (span.n <= kOfOneBlock ? small : large).push_back(span);
  }
  if (const Status status = take_headroom_of_long(large, stream); status != 0) return status;
  return in_batches(
      small.data(), static_cast<int>(small.size()), [](const HeadroomSpan&) { return 1; },
      [stream](const Batch<HeadroomSpan>& batch) {
        return launch(take_out_headroom, batch.tiles(), kThreads, stream, batch);
      });
}

__global__ void __launch_bounds__(kThreads)
    look_for_nan(const float* x, std::uint64_t n, std::uint32_t* flags) {
  std::uint32_t largest = 0;
  for (std::uint64_t i = first_index(); i < n; i += index_stride()) {
    const std::uint32_t each = magnitude_bits(x[i]);
    largest = each > largest ? each : largest;
  }
  if (__syncthreads_or(largest >= kInfinityBits ? 1 : 0) != 0 && threadIdx.x == 0)
    set_flag(flags, kNotFinite);
}

Status check_finite(const float* x, std::uint64_t n, std::uint32_t* flags, Stream stream) {
  return launch(look_for_nan, blocks_for(n, kThreads * kEach), kThreads, stream, x, n, flags);
}

__device__ __host__ std::uint64_t right_size(const GpuMatrix& each) {
  return each.of.columns * each.of.rank;
}

__global__ void __launch_bounds__(kThreads)
    copy_to_memory(const __grid_constant__ Batch<GpuMatrix> all) {
  all.each_tile([](Tile<GpuMatrix> tile) {
    const Memory& memory = tile.span.memory;
    const std::uint64_t i = tile.number * kThreads + threadIdx.x;
    float* to = one_of(memory.factor, 1 - memory.key_state->which_memory);
    if (i < right_size(tile.span)) to[i] = tile.span.q[i];
  });
}

Status remember(const GpuMatrix* all, int count, Stream stream) {
  if (count == 0 || all[0].memory.factor[0] == nullptr) return 0;
  const auto tiles = [](const GpuMatrix& each) { return blocks_for(right_size(each), kThreads); };
  return in_batches(all, count, tiles, [stream](const Batch<GpuMatrix>& batch) {
    return launch(copy_to_memory, batch.tiles(), kThreads, stream, batch);
  });
}

}  // namespace

void fill_factors(Api& api) {
  api.start_factor = start_factor;
  api.take_headroom = take_headroom;
  api.check_finite = check_finite;
  api.remember = remember;
}

}  // namespace gradwire::cuda
