// lowrank: the kernels on factors alone, between the passes over matrices (codec/lowrank.h).
#include "gradwire/codec/factors.h"

#include "gradwire/codec/splitmix64.h"
#include "gradwire/cuda/plugin/block.cuh"
#include "gradwire/cuda/plugin/floats.cuh"
#include "gradwire/cuda/plugin/functions.h"
#include "gradwire/cuda/plugin/gpu.cuh"
#include "gradwire/cuda/plugin/run_feedback.cuh"

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

__global__ void __launch_bounds__(kThreads) begin_columns(Memory memory, Matrix of, float* q) {
  const float* last =
      memory.factor[0] == nullptr ? nullptr : one_of(memory.factor, memory.key_state->which_memory);
  for (std::uint64_t k = blockIdx.x; k < of.rank; k += gridDim.x) {
    float* column = q + k * of.columns;
    if (last != nullptr) {
      const auto kept = [=](std::uint64_t j) { return last[k * of.columns + j]; };
      const std::uint32_t largest = largest_of(of.columns, kept);
      if (largest > 0 && largest < kInfinityBits) {
        write_scaled(largest, of.columns, column, kept);
        continue;
      }
    }
    const auto anew = [=](std::uint64_t j) { return drawn(k, j); };
    write_scaled(largest_of(of.columns, anew), of.columns, column, anew);
  }
}

Status start_factor(Memory memory, Matrix of, float* q, Stream stream) {
  if (of.columns == 0) return 0;
  return launch(begin_columns, of.rank, kThreads, stream, memory, of, q);
}

// ---- take_headroom, check_finite, remember ------------------------------------------------------

constexpr std::uint64_t kEach = 8;                    // least elements per thread
constexpr std::uint64_t kOfOneBlock = 32 * kThreads;  // most elements for a single launch

// The scale of factors that are too large to be multiplied by it.
constexpr float kLargeScale = 1 / codec::kHeadroom;

__global__ void __launch_bounds__(kThreads)
    take_out_headroom(float* q, std::uint64_t n, float* scale) {
  const std::uint32_t largest = largest_of(n, [=](std::uint64_t i) { return q[i]; });
  const bool large = __uint_as_float(largest) > 0x1p64F;
  for (std::uint64_t i = threadIdx.x; !large && i < n; i += blockDim.x) q[i] *= kLargeScale;
  if (threadIdx.x == 0) *scale = large ? kLargeScale : 1;
}

// Returns the scale for a largest magnitude. Where that is NaN, so is the scale: as bits it is more
// than all others, so that it prevails in find_scale().
__device__ float scale_of(std::uint32_t largest) {
  if (largest > kInfinityBits) return quiet_nan<float>();
  return __uint_as_float(largest) > 0x1p64F ? kLargeScale : 1;
}

// Sets `scale`, which is 0 before, to the largest of the blocks' scale_of().
__global__ void __launch_bounds__(kThreads)
    find_scale(const float* q, std::uint64_t n, std::uint32_t* scale) {
  std::uint32_t most = 0;
  for (std::uint64_t i = first_index(); i < n; i += index_stride())
    most = Larger{}(most, magnitude_bits(q[i]));
  most = block_largest(most);
  if (threadIdx.x == 0) atomicMax(scale, __float_as_uint(scale_of(most)));
}

// The first thread may replace a scale of NaN by 1 while other blocks still read it. This is
// harmless: neither of the two is kLargeScale.
__global__ void __launch_bounds__(kThreads)
    multiply_by_scale(float* q, std::uint64_t n, std::uint32_t* scale) {
  if (*scale == __float_as_uint(kLargeScale)) return;
  for (std::uint64_t i = first_index(); i < n; i += index_stride()) q[i] *= kLargeScale;
  if (first_index() == 0) atomicExch(scale, __float_as_uint(1.0F));
}

Status take_headroom(float* q, std::uint64_t n, float* scale, Stream stream) {
  if (n <= kOfOneBlock)
    return launch(take_out_headroom, n == 0 ? 0 : 1, kThreads, stream, q, n, scale);
  const std::uint64_t blocks = blocks_for(n, kThreads * kEach);
  auto* const bits = reinterpret_cast<std::uint32_t*>(scale);
  Status status = static_cast<Status>(cudaMemsetAsync(scale, 0, sizeof *scale, stream));
  if (status == 0) status = launch(find_scale, blocks, kThreads, stream, q, n, bits);
  if (status != 0) return status;
  return launch(multiply_by_scale, blocks, kThreads, stream, q, n, bits);
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

__global__ void __launch_bounds__(kThreads)
    copy_to_memory(Memory memory, const float* q, std::uint64_t n) {
  float* to = one_of(memory.factor, 1 - memory.key_state->which_memory);
  for (std::uint64_t i = first_index(); i < n; i += index_stride()) to[i] = q[i];
}

Status remember(Memory memory, const float* q, std::uint64_t n, Stream stream) {
  if (memory.factor[0] == nullptr) return 0;
  return launch(copy_to_memory, blocks_for(n, kThreads), kThreads, stream, memory, q, n);
}

}  // namespace

void fill_factors(Api& api) {
  api.start_factor = start_factor;
  api.take_headroom = take_headroom;
  api.check_finite = check_finite;
  api.remember = remember;
}

}  // namespace gradwire::cuda
