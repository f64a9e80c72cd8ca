// Segmentation: into how many segments a call is cut, and which of them each chunk takes part in.
// A *whole* is a chunk of the schedule; its share of one segment is a chunk of the plan. Both ends
// of a frame compute the same, from what both know.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "gradwire/exec/plan/chunk_layout.h"
#include "gradwire/schedule/schedule.h"

namespace gradwire::exec {

class Segmentation {
 public:
  using Payload = std::function<std::size_t(const Span&)>;  // bytes of a span on the wire

  // Cuts all wholes into as many chunks (schedule::Cut), so that every frame has at most `room`
  // bytes, and the most bytes that go between two ranks in a round are cut about every `target`
  // bytes; 0 takes the default. Throws ScheduleError if one step of a whole does not fit.
  static Segmentation even(const schedule::Schedule& schedule, const ChunkLayout& layout,
                           const Payload& payload, std::size_t room, std::size_t target);
  // Cuts each whole by itself, into chunks of at most so many steps of the layout: for blocks whose
  // size only two ranks know, and which share a frame with no other.
  static Segmentation each_by_itself(int wholes, const ChunkLayout& layout,
                                     std::size_t steps_in_room);

  int segments() const noexcept { return segments_; }
  // Return the chunks of a whole, and the most chunks of any.
  int chunks_of(int whole) const { return wholes_[at(whole)].chunks; }
  int most_chunks() const noexcept { return most_; }

  int segment_of(int whole, int chunk) const {
    return (wholes_[at(whole)].first_segment + chunk) % segments_;
  }
  // Returns which chunk of a whole is in a segment.
  int in_segment(int whole, std::uint32_t segment) const {
    return (static_cast<int>(segment) - wholes_[at(whole)].first_segment + segments_) % segments_;
  }
  // Returns a chunk's place in a list of all, which has most_chunks() for each whole.
  std::size_t index(int whole, int chunk) const { return at(whole) * at(most_) + at(chunk); }

 private:
  struct Whole {
    int chunks = 1;
    int first_segment = 0;
  };

  int segments_ = 1;
  int most_ = 1;
  std::vector<Whole> wholes_;
};

}  // namespace gradwire::exec
