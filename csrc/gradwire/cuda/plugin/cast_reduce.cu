// An all_reduce in fp16 or bf16 as one kernel over staging, with the payloads of `direct`.
//
//   encode x + e -> own staging | meet | own x + payloads + e: encode -> own staging, y | meet |
//   decode the others' -> y
#include "gradwire/cuda/plugin/cast_codec.cuh"
#include "gradwire/cuda/plugin/functions.h"
#include "gradwire/cuda/plugin/run_feedback.cuh"
#include "gradwire/cuda/plugin/steps.cuh"

namespace gradwire::cuda {
namespace {

constexpr unsigned kCount = 4;  // elements of a thread
constexpr std::uint32_t kStretch = kStagedThreads * kCount;

struct CastReduction {
  Steps steps;
  CastScale scale;
  float factor;
  std::uint32_t* flags;
};

// Addresses of a tile.
struct CastTile {
  const float* x;
  float* y;
  const float* before;  // e and e'; null without feedback
  float* after;
  std::uint64_t n;
  int owner;
};

__device__ CastTile cast_tile(const Tile& of) {
  const SummedRun& run = *of.run;
  const bool keeps = keeps_errors(run.run_feedback);
  const Feedback feedback = keeps ? feedback_of(run.run_feedback) : Feedback{};
  return {reinterpret_cast<const float*>(run.x) + of.begin,
          reinterpret_cast<float*>(run.y) + of.begin,
          keeps ? feedback.before + of.begin : nullptr,
          keeps ? feedback.after + of.begin : nullptr,
          of.n,
          run.owner};
}

__device__ std::uint16_t* staged(const CastReduction& of, int rank, unsigned number) {
  return reinterpret_cast<std::uint16_t*>(tile_of(of.steps.staging, rank, number));
}

// Encodes v, which gets the residual first, and writes what is lost as the next residual.
template <typename Half, unsigned kWide>
__device__ void encode(const CastReduction& of, const CastTile& tile, std::uint64_t at,
                       float (&v)[kCount], std::uint16_t (&h)[kCount]) {
  const Share<kStagedThreads, kCount, kWide> share{threadIdx.x};
  const bool keeps = tile.before != nullptr;
  float e[kCount] = {};
  if (keeps) share.load(tile.before + at, tile.n - at, e);
#pragma unroll
  for (unsigned i = 0; i < kCount; ++i) {
    if (keeps) v[i] = v[i] + e[i];
    if (is_finite(v[i])) {
      h[i] = cast<Half>(v[i], of.scale);
      e[i] = v[i] - Half::widen_number(h[i]) * of.scale.back;
    } else {
      h[i] = narrow<Half>(keeps ? canonical(v[i]) : v[i]);
      e[i] = 0;
    }
  }
  if (keeps) share.store(tile.after + at, tile.n - at, e);
}

template <typename Half, unsigned kWide>
__device__ void send(const CastReduction& of, const CastTile& tile, std::uint16_t* to) {
  const Share<kStagedThreads, kCount, kWide> share{threadIdx.x};
  for (std::uint64_t at = 0; at < tile.n; at += kStretch) {
    float v[kCount];
    std::uint16_t h[kCount];
    share.load(tile.x + at, tile.n - at, v);
    encode<Half, kWide>(of, tile, at, v, h);
    share.store(to + at, tile.n - at, h);
  }
}

// Adds the payloads in staging tile `from` of all other ranks to the own x, encodes the sum into
// `to`, and writes what that decodes to. Returns whether all of it was finite.
template <typename Half, unsigned kWide>
__device__ bool finish(const CastReduction& of, const CastTile& tile, unsigned from,
                       std::uint16_t* to) {
  const Share<kStagedThreads, kCount, kWide> share{threadIdx.x};
  const int p = of.steps.staging.size;
  bool good = true;
  for (std::uint64_t at = 0; at < tile.n; at += kStretch) {
    const std::uint64_t left = tile.n - at;
    float v[kCount];
    std::uint16_t h[kCount];
    share.load(tile.x + at, left, v);
#pragma unroll 4
    for (int turn = 1; turn < p; ++turn) {
      const int rank = tile.owner >= turn ? tile.owner - turn : tile.owner - turn + p;
      share.load(staged(of, rank, from) + at, left, h);
#pragma unroll
      for (unsigned i = 0; i < kCount; ++i) {
        const float each = decoded<Half>(h[i], of.scale);
        good = good && is_finite(each);
        v[i] = canonical(v[i] + each);
      }
    }
    encode<Half, kWide>(of, tile, at, v, h);
    share.store(to + at, left, h);
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) {
      const float each = decoded<Half>(h[i], of.scale);
      good = good && is_finite(each);
      v[i] = times(each, of.factor);
    }
    share.store(tile.y + at, left, v);
  }
  return good;
}

template <typename Half, unsigned kWide>
__device__ bool receive(const CastReduction& of, const CastTile& tile, const std::uint16_t* from) {
  const Share<kStagedThreads, kCount, kWide> share{threadIdx.x};
  bool good = true;
  for (std::uint64_t at = 0; at < tile.n; at += kStretch) {
    float v[kCount];
    std::uint16_t h[kCount];
    share.load(from + at, tile.n - at, h);
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) {
      const float each = decoded<Half>(h[i], of.scale);
      good = good && is_finite(each);
      v[i] = times(each, of.factor);
    }
    share.store(tile.y + at, tile.n - at, v);
  }
  return good;
}

__device__ bool is_wide(const CastTile& tile) {
  return all_aligned(tile.x, tile.y, tile.before, tile.after);
}

// Returns false where a rank never comes. `good`: whether all results so far are finite.
template <typename Half>
__device__ bool take_step(const CastReduction& of, std::uint32_t step, std::uint64_t& number,
                          bool& good) {
  const int rank = of.steps.staging.rank;
  const auto p = static_cast<unsigned>(of.steps.staging.size);
  const auto half = static_cast<unsigned>(++number % 2 * p), sums = 2 * p;
  each_tile(of.steps, step, [&](int owner, const Tile& each) {
    if (owner == rank) return;
    const CastTile tile = cast_tile(each);
    std::uint16_t* to = staged(of, rank, half + static_cast<unsigned>(owner));
    is_wide(tile) ? send<Half, kCount>(of, tile, to) : send<Half, 1>(of, tile, to);
  });
  if (!meet(of.steps.staging, number)) return false;
  each_tile(of.steps, step, [&](int owner, const Tile& each) {
    if (owner != rank) return;
    const CastTile tile = cast_tile(each);
    const unsigned from = half + static_cast<unsigned>(owner);
    std::uint16_t* to = staged(of, rank, sums);
    good = (is_wide(tile) ? finish<Half, kCount>(of, tile, from, to)
                          : finish<Half, 1>(of, tile, from, to)) &&
           good;
  });
  if (!meet(of.steps.staging, ++number)) return false;
  each_tile(of.steps, step, [&](int owner, const Tile& each) {
    if (owner == rank) return;
    const CastTile tile = cast_tile(each);
    const std::uint16_t* from = staged(of, owner, sums);
    good = (is_wide(tile) ? receive<Half, kCount>(of, tile, from)
                          : receive<Half, 1>(of, tile, from)) &&
           good;
  });
  return true;
}

template <typename Half>
__global__ void __launch_bounds__(kStagedThreads)
    cast_reduce_kernel(const __grid_constant__ CastReduction of) {
  std::uint64_t number = head_of(of.steps.staging, of.steps.staging.rank).met[blockIdx.x];
  __syncthreads();  // all threads have read it
  bool good = true;
  for (std::uint32_t step = blockIdx.x; step < of.steps.count; step += gridDim.x)
    if (!take_step<Half>(of, step, number, good)) return;
  if (__syncthreads_or(!good) && threadIdx.x == 0) set_flag(of.flags, kNotFinite);
}

Status cast_reduce(const Staging& staging, Cast cast, float scale, const SummedRun* runs, int count,
                   float factor, std::uint32_t* flags, Stream stream) {
  CastReduction of{{}, CastScale::of(cast, scale), factor, flags};
  of.steps.staging = staging;
  of.steps.one_shot = false;
  return in_steps(of.steps, runs, count, 1, kStretch, [&](const Steps& steps) {
    of.steps = steps;
    return launch_waiting(cast == Cast::kFp16 ? cast_reduce_kernel<Fp16> : cast_reduce_kernel<Bf16>,
                          steps.blocks(), kStagedThreads, stream, of);
  });
}

}  // namespace

void fill_cast_reduce(Api& api) { api.cast_reduce = cast_reduce; }

}  // namespace gradwire::cuda
