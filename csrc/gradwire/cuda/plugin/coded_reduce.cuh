// All_reduces in a codec as one kernel over staging, with the payloads of the schedule `direct`.
//
//   encode x + e -> own staging | meet | own x + payloads + e: encode -> own staging, y | meet |
//   decode the others' -> y
//
// Always in two shots, since one rank must encode a sum.
#pragma once

#include "gradwire/cuda/plugin/payloads.cuh"
#include "gradwire/cuda/plugin/run_feedback.cuh"
#include "gradwire/cuda/plugin/steps.cuh"

namespace gradwire::cuda {

// Addresses of a tile.
struct CodedTile {
  const float* x;
  float* y;
  const float* before;  // e and e'; null without feedback
  float* after;
  std::uint64_t n;

  __device__ static CodedTile of(const Tile& tile) {
    const SummedRun& run = *tile.run;
    const bool keeps = keeps_errors(run.run_feedback);
    const Feedback feedback = keeps ? feedback_of(run.run_feedback) : Feedback{};
    return {reinterpret_cast<const float*>(run.x) + tile.begin,
            reinterpret_cast<float*>(run.y) + tile.begin,
            keeps ? feedback.before + tile.begin : nullptr,
            keeps ? feedback.after + tile.begin : nullptr, tile.n};
  }
  __device__ bool is_wide() const { return all_aligned(x, y, before, after); }
};

// The payloads of the other ranks for a tile of `owner`, in the order in which they are added.
struct StagedPayloads {
  static constexpr bool kAny = true;

  const Staging& staging;
  unsigned tile;
  int owner;

  __device__ int count() const { return staging.size - 1; }
  __device__ const std::byte* at(int turn) const {
    const int rank = owner > turn ? owner - turn - 1 : owner - turn - 1 + staging.size;
    return tile_of(staging, rank, tile);
  }
};

// Calls visit(unit, first, n) for the units that the team takes of a tile of `all` elements: a
// unit's number, first element, and number of elements. Teams of one warp take turns.
template <typename Team, typename Visit>
__device__ void each_unit(std::uint64_t all, std::uint64_t elements, Visit visit) {
  const unsigned step = Team::kOneWarp ? blockDim.x / kWarp : 1;
  std::uint64_t unit = Team::kOneWarp ? threadIdx.x / kWarp : 0;
  for (std::uint64_t first = unit * elements; first < all; first = unit * elements) {
    const std::uint64_t left = all - first;
    visit(unit, first, left < elements ? left : elements);
    unit += step;
  }
}

// Takes a tile of each owner; returns false where a rank never comes. `codec` has
//   send(tile, to): encodes x + e;
//   finish(tile, payloads, to): adds the payloads to x, then e, encodes, and decodes that to y;
//   receive(tile, from): decodes to y.
template <typename Codec>
__device__ bool take_coded_step(const Steps& of, std::uint32_t step, std::uint64_t& number,
                                Codec& codec) {
  const int rank = of.staging.rank;
  const auto p = static_cast<unsigned>(of.staging.size);
  const auto half = static_cast<unsigned>(++number % 2 * p), sums = 2 * p;
  each_tile(of, step, [&](int owner, const Tile& tile) {
    if (owner != rank)
      codec.send(tile, tile_of(of.staging, rank, half + static_cast<unsigned>(owner)));
  });
  if (!meet(of.staging, number)) return false;
  each_tile(of, step, [&](int owner, const Tile& tile) {
    if (owner != rank) return;
    const StagedPayloads payloads{of.staging, half + static_cast<unsigned>(owner), owner};
    codec.finish(tile, payloads, tile_of(of.staging, rank, sums));
  });
  if (!meet(of.staging, ++number)) return false;
  each_tile(of, step, [&](int owner, const Tile& tile) {
    if (owner != rank) codec.receive(tile, tile_of(of.staging, owner, sums));
  });
  return true;
}

// For all threads of a block: takes its steps. Returns false where a rank never comes.
template <typename Codec>
__device__ bool reduce_coded(const Steps& of, Codec& codec) {
  std::uint64_t number = head_of(of.staging, of.staging.rank).met[blockIdx.x];
  if (is_over(of.staging)) return false;
  for (std::uint32_t step = blockIdx.x; step < of.count; step += gridDim.x)
    if (!take_coded_step(of, step, number, codec)) return false;
  return true;
}

// Calls start(steps) for runs in a codec with units of `unit` elements and at most `unit_bytes`,
// kMostRuns at a time. A unit must fit into a tile.
template <typename Start>
Status in_coded_steps(const Staging& staging, const SummedRun* runs, int count, std::uint64_t unit,
                      std::uint64_t unit_bytes, Start start) {
  if (unit_bytes > kTileBytes) return cudaErrorInvalidValue;
  Steps steps{};
  steps.staging = staging;
  steps.one_shot = false;
  return in_steps(
      steps, runs, count, 1,
      {static_cast<std::uint32_t>(unit), static_cast<std::uint32_t>(kTileBytes / unit_bytes)},
      start);
}

}  // namespace gradwire::cuda
