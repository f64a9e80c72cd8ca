// ChunkLayout: where the chunks of a schedule lie in the caller's arrays (extents), and how they
// are cut into segments.
//
// Cuts are only at multiples of `unit` elements, counted from the start of the extent, so that the
// bits of a block codec never depend on segment size, chunking or number of ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gradwire/exec/plan/plan.h"

namespace gradwire::exec {

class ChunkLayout {
 public:
  // Gives each chunk the same number of extents (`chunks_are_extents`), or cuts all extents, end to
  // end, into `chunks` even parts.
  ChunkLayout(const std::vector<std::uint64_t>& counts, int chunks, std::size_t unit,
              bool chunks_are_extents);

  // Appends the pieces of segment `segment` of `segments` of a chunk, in order.
  void append(int chunk, int segment, int segments, std::vector<Piece>& out) const;

  std::size_t units(int chunk) const { return ends_[at(chunk)] - begins_[at(chunk)]; }

 private:
  void append_units(std::size_t first, std::size_t last, std::vector<Piece>& out) const;

  std::size_t unit_;
  std::vector<std::uint64_t> counts_;
  std::vector<std::size_t> extent_units_;   // prefix sums: first unit of each extent, and the end
  std::vector<std::size_t> begins_, ends_;  // units of each chunk
};

}  // namespace gradwire::exec
