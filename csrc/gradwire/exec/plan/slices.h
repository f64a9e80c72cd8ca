// Slices: into how many slices each chunk of a plan is cut, and in which segment each of them is.
// Both ends of a message compute the same, from what both know.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "gradwire/exec/plan/chunk_layout.h"
#include "gradwire/schedule/schedule.h"

namespace gradwire::exec {

class Slices {
 public:
  using Payload = std::function<std::size_t(const Piece&)>;  // bytes of a piece on the wire

  // Cuts all chunks into as many slices (schedule::Cut), so that every frame has at most `room`
  // bytes and the largest message is cut about every `target` bytes; 0 takes the default. Throws
  // ScheduleError if a unit of a chunk does not fit.
  static Slices even(const schedule::Schedule& schedule, const ChunkLayout& layout,
                     const Payload& payload, std::size_t room, std::size_t target);
  // Cuts each chunk by itself, for blocks whose size only the two ends of a message know, which
  // have no message in common with other blocks.
  static Slices by_chunk(int chunks, const ChunkLayout& layout, std::size_t units_in_room);

  int segments() const noexcept { return segments_; }
  int of(int chunk) const { return slices_[at(chunk)]; }
  int most() const noexcept { return most_; }  // of any chunk

  int segment_of(int chunk, int slice) const { return (begin(chunk) + slice) % segments_; }
  // Returns the slice of a chunk that is in a segment.
  int in_segment(int chunk, std::uint32_t segment) const {
    return (static_cast<int>(segment) - begin(chunk) + segments_) % segments_;
  }
  // Returns the place of a slice in a list of all, which has `most()` for each chunk.
  std::size_t index(int chunk, int slice) const { return at(chunk) * at(most_) + at(slice); }

 private:
  int begin(int chunk) const { return begins_[at(chunk)]; }

  int segments_ = 1;
  int most_ = 1;
  std::vector<int> slices_, begins_;  // by chunk; the segment of its first slice
};

}  // namespace gradwire::exec
