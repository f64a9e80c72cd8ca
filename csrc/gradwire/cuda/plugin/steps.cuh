// How kernels that all ranks launch alike cut runs into tiles, and share them: block b of each rank
// takes the same ones.
#pragma once

#include "gradwire/cuda/plugin/batch.cuh"
#include "gradwire/cuda/plugin/staging.cuh"

namespace gradwire::cuda {

// In one shot a step is one tile of any owner, else one of each owner.
struct Steps {
  Staging staging;
  Batch<SummedRun> runs;
  std::uint32_t first[kMostMapped + 1];  // tiles before those of each owner, and all
  std::uint32_t count;
  std::uint32_t tile;  // elements
  bool one_shot;

  unsigned blocks() const { return count < kMeetingBlocks ? count : kMeetingBlocks; }
};

// A tile of a run: elements [begin, begin + n).
struct Tile {
  const SummedRun* run;
  std::uint64_t begin;
  std::uint64_t n;
};

__device__ inline Tile find_tile(const Steps& of, std::uint32_t number) {
  const unsigned r = of.runs.find(number);
  const SummedRun& run = of.runs.at[r];
  const std::uint64_t begin = std::uint64_t{number - of.runs.first[r]} * of.tile;
  const std::uint64_t left = run.n - begin;
  return {&run, begin, left < of.tile ? left : of.tile};
}

// Calls each(owner, tile) for the tile of each owner that this step has.
template <typename Each>
__device__ void each_tile(const Steps& of, std::uint32_t step, Each each) {
  for (int owner = 0; owner < of.staging.size; ++owner)
    if (of.first[owner] + step < of.first[owner + 1])
      each(owner, find_tile(of, of.first[owner] + step));
}

// What a tile is made of: at most so many stretches of so many elements.
struct Stretches {
  std::uint32_t elements, most;
};

// Returns the elements of a tile: few enough that all blocks have some, if there are so many.
inline std::uint32_t tile_for(const SummedRun* runs, int count, const Steps& of, unsigned each,
                              Stretches stretches) {
  std::uint64_t elements = 0;
  for (int i = 0; i < count; ++i) elements += runs[i].n * each;
  const std::uint64_t owners = of.one_shot ? 1 : static_cast<std::uint64_t>(of.staging.size);
  const std::uint64_t its = blocks_for(elements, owners * kMeetingBlocks * stretches.elements);
  return stretches.elements *
         static_cast<std::uint32_t>(its < stretches.most ? its : stretches.most);
}

// Calls start(steps) for all runs, kMostRuns at a time. A run has n · each elements.
template <typename Start>
Status in_steps(Steps of, const SummedRun* runs, int count, unsigned each, Stretches stretches,
                Start start) {
  of.tile = tile_for(runs, count, of, each, stretches);
  const auto in_elements = [each](SummedRun run) {
    run.n *= each;
    return run;
  };
  return in_batches(
      runs, count, in_elements,
      [&](const SummedRun& run) { return blocks_for(run.n * each, of.tile); },
      [&](const Batch<SummedRun>& batch) {
        of.runs = batch;
        of.count = 0;
        unsigned r = 0;
        for (int owner = 0; owner < of.staging.size; ++owner) {
          of.first[owner] = batch.first[r];
          while (r < batch.count && batch.at[r].owner == owner) ++r;
          of.first[owner + 1] = batch.first[r];
          const std::uint32_t tiles = of.first[owner + 1] - of.first[owner];
          of.count = of.one_shot ? of.count + tiles : tiles > of.count ? tiles : of.count;
        }
        return start(of);
      });
}

}  // namespace gradwire::cuda
