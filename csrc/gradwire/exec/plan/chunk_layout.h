// ChunkLayout: the spans of the caller's arrays that a schedule's chunks consist of.
//
// Arrays are cut only at multiples of `alignment` elements, counted from the start of each, so that
// the bits of a block codec never depend on the segments, the chunks or the number of ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gradwire/exec/plan/plan.h"

namespace gradwire::exec {

class ChunkLayout {
 public:
  // Gives each chunk the same number of arrays (`chunks_are_arrays`), or cuts all arrays, end to
  // end, into `chunks` of nearly the same size. `counts`: the elements of each array.
  ChunkLayout(const std::vector<std::uint64_t>& counts, int chunks, std::size_t alignment,
              bool chunks_are_arrays);

  // Cuts a chunk into `parts` of nearly the same size, and appends the spans of one, in order.
  void append(int chunk, int part, int parts, std::vector<Span>& out) const;

  // Returns the size of a chunk in steps of `alignment` elements.
  std::size_t steps(int chunk) const { return places_[at(chunk)].steps; }

 private:
  struct Place {
    std::size_t first = 0, steps = 0;
  };

  std::size_t alignment_;
  std::vector<std::uint64_t> counts_;
  std::vector<std::size_t> first_steps_;  // of each array, and the end
  std::vector<Place> places_;             // of each chunk
};

}  // namespace gradwire::exec
