// A Plan is a Schedule bound to one rank, one shape of buffers, a dtype and a codec. It says which
// frames this rank sends and receives, in which order, and where in memory they come from and land.
// It holds no pointers and no state, so plans are cached and shared by all calls of the same shape.
//
// Pipelining: chunks are cut into slices, these are dealt out to segments (schedule/cost.h: Cut),
// and the schedule runs once per segment, several at a time. Frames stand in one wavefront order,
// the same on all ranks:
//     (segment + lag · round, segment, sends before receives).
// A send may go when the earlier receives of its own segment have landed. A receive may land when
// the sends of its own round are staged. Both conditions are one integer, `needs`. Everything that
// a frame waits for comes earlier in the order, and staging holds one round of sends, so no order
// of arrivals, and no size of staging above that, can cause a deadlock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gradwire/base/op.h"
#include "gradwire/codec/codec.h"
#include "gradwire/exec/plan/wide_folds.h"
#include "gradwire/schedule/schedule.h"

namespace gradwire::exec {

// A run of elements inside one extent (one of the caller's arrays, or one key's part of it).
struct Piece {
  std::uint32_t extent = 0;
  std::size_t offset = 0;  // elements
  std::size_t count = 0;   // elements
};

struct Range {
  std::uint32_t first = 0;
  std::uint32_t last = 0;
};

inline constexpr std::uint32_t kNotStored = ~0U;

// One segment of one chunk inside a frame.
struct Part {
  Range pieces;
  schedule::Landing landing = schedule::Landing::kCopy;
  // Set on the rank that first sends a finished chunk: it scales the chunk (avg) and, with a lossy
  // codec, encodes it into the store and adopts what all ranks will decode.
  bool finishes = false;
  // Lossy codecs: finished chunks are forwarded verbatim from this place in the store.
  std::uint32_t stored = kNotStored;
  WideFold wide{};  // 16-bit floats: what to do with an addend that arrives
};

struct Frame {
  std::uint32_t segment = 0;
  std::uint32_t segments = 1;  // into which its message is cut
  std::uint16_t round = 0;
  Range parts;
  Range peers;              // one for a receive; all readers of the same bytes for a send
  std::uint32_t needs = 0;  // send: receives that must have landed; receive: sends staged
  // Plain folds. Receive: how many frames, from this one on, add to the same elements one after the
  // other. Send: 1 if it sends what the last receive that it needs has added up, else 0.
  std::uint32_t addends = 0;
  std::uint64_t bytes = 0;  // payload, at most (exactly, unless the codec's size varies)
};

// Everything that determines a Plan, besides the schedule.
struct Binding {
  OpSpec spec;
  std::vector<std::uint64_t> counts;  // of each extent, as far as this rank knows them
  // True if all ranks know all counts, and cut every chunk into the same number of slices.
  // Otherwise (gather, scatter, all_to_all) each chunk is cut by its own size, which both its ends
  // know.
  bool uniform_segments = true;
  Rank rank = 0;
  std::shared_ptr<const codec::Codec> codec;
  bool in_tree = false;  // from schedule::verify's report
  // The schedule is an all_gather of the ranks' inputs, end to end, and the operation adds them up.
  bool folds = false;
  std::size_t max_message = 0;    // bytes, frame header included
  std::vector<int> link_of;       // by peer; peers with the same number can share staging
  std::size_t segment_bytes = 0;  // 0: chosen from the chunk's size
};

class Plan {
 public:
  // Throws ScheduleError if codec and schedule do not fit together, and InvalidArgument if dtype,
  // op and codec do not.
  Plan(const schedule::Schedule& schedule, Binding binding);

  const OpSpec& spec() const noexcept { return binding_.spec; }
  const std::vector<std::uint64_t>& counts() const noexcept { return binding_.counts; }
  const codec::Codec& codec() const noexcept { return *binding_.codec; }
  bool folds() const noexcept { return binding_.folds; }
  bool lossy() const noexcept { return binding_.codec->combine() != codec::Combine::kPlain; }
  std::uint32_t fingerprint() const noexcept { return fingerprint_; }
  // Returns OpSpec::to_string(), for messages.
  const std::string& text() const noexcept { return text_; }
  int segments() const noexcept { return segments_; }
  // Returns whether every rank knows how much each rank sends; else (gather, scatter, all_to_all)
  // only both ends of a message know.
  bool all_sizes_known() const noexcept { return binding_.uniform_segments; }
  // Returns whether a rank that has finished the call knows that all ranks have begun the same one.
  bool confirms_all_ranks() const noexcept;
  // Both return the bytes of payload between this rank and `peer`, at most.
  std::uint64_t bytes_to(Rank peer) const { return bytes_with(sends_, peer); }
  std::uint64_t bytes_from(Rank peer) const { return bytes_with(receives_, peer); }

  const std::vector<Frame>& sends() const noexcept { return sends_; }
  const std::vector<Frame>& receives() const noexcept { return receives_; }
  std::span<const Part> parts(const Frame& frame) const { return view(parts_, frame.parts); }
  std::span<const Piece> pieces(const Part& part) const { return view(pieces_, part.pieces); }
  std::span<const Rank> peers(const Frame& frame) const { return view(peers_, frame.peers); }

  // For lossy codecs: where the payload of a stored part lies, how many there are, and the size of
  // the whole store.
  std::size_t store_offset(std::uint32_t stored) const { return store_offsets_[stored]; }
  std::size_t stored_parts() const noexcept { return store_offsets_.size(); }
  std::size_t store_bytes() const noexcept { return store_bytes_; }

  // Where a float32 sum lies, and how many elements such sums take in all.
  std::size_t wide_offset(const WideFold& fold) const noexcept {
    return fold.place * wide_elements_;
  }
  std::size_t wide_elements() const noexcept { return wide_places_ * wide_elements_; }

  // Returns the most addends of any frame.
  std::size_t most_addends() const noexcept { return most_addends_; }

  // Returns what avg divides by: the number of ranks; 1 for every other op.
  int divisor() const noexcept { return divisor_; }
  // Returns the results that this rank neither sends nor receives in finished form, to be finished
  // when everything has landed. Empty if nothing is to be done for them.
  const std::vector<Piece>& finished_here() const noexcept { return finished_here_; }

 private:
  class Builder;

  template <typename T>
  static std::span<const T> view(const std::vector<T>& all, Range range) {
    return {all.data() + range.first, range.last - range.first};
  }

  std::uint64_t bytes_with(const std::vector<Frame>& frames, Rank peer) const;

  Binding binding_;
  std::uint32_t fingerprint_ = 0;
  std::string text_;
  int segments_ = 1;
  int divisor_ = 1;
  std::vector<Frame> sends_;
  std::vector<Frame> receives_;
  std::vector<Part> parts_;
  std::vector<Piece> pieces_;
  std::vector<Rank> peers_;
  std::vector<std::size_t> store_offsets_;
  std::size_t store_bytes_ = 0;
  std::vector<Piece> finished_here_;
  std::size_t most_addends_ = 0;
  std::size_t wide_places_ = 0;
  std::size_t wide_elements_ = 0;  // of the largest sum
};

}  // namespace gradwire::exec
