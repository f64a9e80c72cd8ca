// An all_reduce in fp16 or bf16 as one kernel over staging (coded_reduce.cuh).
#include "gradwire/cuda/plugin/cast/cast_codec.cuh"
#include "gradwire/cuda/plugin/coded_reduce.cuh"
#include "gradwire/cuda/plugin/functions.h"

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

template <typename Half, unsigned kWide>
struct CastStretches {
  const CastReduction& of;
  const CodedTile& tile;
  Share<kStagedThreads, kCount, kWide> share;

  // Encodes the tile, and decodes that to y if it `finishes`. Returns whether all that was decoded
  // is finite.
  template <typename Payloads>
  __device__ bool encode(const Payloads& payloads, std::uint16_t* to, bool finishes) const {
    bool good = true;
    for (std::uint64_t at = 0; at < tile.n; at += kStretch) {
      const std::uint64_t left = tile.n - at;
      const bool keeps = tile.before != nullptr;
      float v[kCount], e[kCount] = {};
      std::uint16_t h[kCount];
      share.load(tile.x + at, left, v);
#pragma unroll 4
      for (int j = 0; j < payloads.count(); ++j) {
        share.load(reinterpret_cast<const std::uint16_t*>(payloads.at(j)) + at, left, h);
        good = add_values<Half>(of.scale, h, v) && good;
      }
      if (keeps) share.load(tile.before + at, left, e);
      encode_values<Half>(of.scale, keeps, v, e, h);
      if (keeps) share.store(tile.after + at, left, e);
      share.store(to + at, left, h);
      if (!finishes) continue;
      good = decode_values<Half>(of.scale, h, of.factor, v) && good;
      share.store(tile.y + at, left, v);
    }
    return good;
  }

  __device__ bool receive(const std::uint16_t* from) const {
    bool good = true;
    for (std::uint64_t at = 0; at < tile.n; at += kStretch) {
      float v[kCount];
      std::uint16_t h[kCount];
      share.load(from + at, tile.n - at, h);
      good = decode_values<Half>(of.scale, h, of.factor, v) && good;
      share.store(tile.y + at, tile.n - at, v);
    }
    return good;
  }
};

template <typename Half>
struct StagedCast {
  const CastReduction& of;
  bool good = true;  // whether all results so far are finite

  template <typename Visit>
  __device__ void visit(const Tile& each, Visit visit) {
    const CodedTile tile = CodedTile::of(each);
    const bool its = tile.is_wide() ? visit(CastStretches<Half, kCount>{of, tile, {threadIdx.x}})
                                    : visit(CastStretches<Half, 1>{of, tile, {threadIdx.x}});
    good = good && its;
  }
  __device__ void send(const Tile& tile, std::byte* to) {
    visit(tile, [&](const auto& its) {
      return its.encode(NoPayloads{}, reinterpret_cast<std::uint16_t*>(to), false);
    });
  }
  __device__ void finish(const Tile& tile, const StagedPayloads& payloads, std::byte* to) {
    visit(tile, [&](const auto& its) {
      return its.encode(payloads, reinterpret_cast<std::uint16_t*>(to), true);
    });
  }
  __device__ void receive(const Tile& tile, const std::byte* from) {
    visit(tile, [&](const auto& its) {
      return its.receive(reinterpret_cast<const std::uint16_t*>(from));
    });
  }
};

template <typename Half>
__global__ void __launch_bounds__(kStagedThreads)
    cast_reduce_kernel(const __grid_constant__ CastReduction of) {
  StagedCast<Half> cast{of};
  if (!reduce_coded(of.steps, cast)) return;
  if (__syncthreads_or(!cast.good) && threadIdx.x == 0) set_flag(of.flags, kNotFinite);
}

Status cast_reduce(const Staging& staging, Cast cast, float scale, const SummedRun* runs, int count,
                   float factor, std::uint32_t* flags, Stream stream) {
  constexpr std::uint64_t kBytes = kStretch * sizeof(std::uint16_t);
  return in_coded_steps(staging, runs, count, kStretch, kBytes, [&](const Steps& steps) {
    const CastReduction of{steps, CastScale::of(cast, scale), factor, flags};
    return launch_waiting(cast == Cast::kFp16 ? cast_reduce_kernel<Fp16> : cast_reduce_kernel<Bf16>,
                          steps.blocks(), kStagedThreads, stream, of);
  });
}

}  // namespace

void fill_cast_reduce(Api& api) { api.cast_reduce = cast_reduce; }

}  // namespace gradwire::cuda
