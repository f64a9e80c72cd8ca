// A Plan is a Schedule bound to one rank, one shape of buffers, a dtype and a codec. It says which
// frames this rank sends and receives, in which order, and where in memory they come from and land.
// It holds no pointers and no state, so plans are cached and shared by all calls of the same shape.
//
// Four units, with a picture in docs/design/files.md:
//     array    contiguous memory of the caller, or one key's part of it
//     chunk    what an edge of the schedule moves; in a plan, that chunk's share of one segment
//     frame    what one message of a transport carries, behind one header: chunks
//     span     a range of elements within one array; a chunk is a list of spans
// A *segment* is no memory but a turn of the schedule in a pipeline: the schedule runs once per
// segment, several at a time (schedule/cost.h: Cut).
//
// Frames stand in one wavefront order, the same on all ranks:
//     (start of the round + segment, segment, sends before receives).
// A send may go when the earlier receives of its own segment have landed. A receive may land when
// the sends of its own round are staged. Both conditions are one integer of the frame. Everything
// that a frame waits for comes earlier in the order, and staging holds one round of sends, so no
// order of arrivals, and no size of staging above that, can cause a deadlock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gradwire/base/op.h"
#include "gradwire/codec/codec.h"
#include "gradwire/codec/lossless.h"
#include "gradwire/exec/plan/wide_folds.h"
#include "gradwire/schedule/schedule.h"

namespace gradwire::exec {

// A range of elements within one array.
struct Span {
  std::uint32_t array = 0;
  std::size_t offset = 0;  // elements
  std::size_t count = 0;   // elements
};

// Places in a list: from `first` to before `last`.
struct Range {
  std::uint32_t first = 0;
  std::uint32_t last = 0;

  bool empty() const noexcept { return first == last; }
  bool operator==(const Range&) const = default;
};

template <typename T>
std::span<const T> view(const std::vector<T>& all, Range range) {
  return {all.data() + range.first, range.last - range.first};
}

inline constexpr std::uint32_t kNotStored = ~0U;

// The share of a schedule's chunk in one segment.
struct Chunk {
  Range spans;
  int whole = 0;  // the number of the schedule's chunk
  schedule::Landing landing = schedule::Landing::kCopy;
  // The rank that first sends a finished sum divides it (avg) and, with a lossy codec, encodes it
  // into the store and takes over what all ranks will decode.
  bool completes_sum = false;
  bool coded = false;  // it travels as a payload of the codec
  // Lossy codecs: the number of its payload in the store, from which it is forwarded unchanged.
  std::uint32_t store_index = kNotStored;
  WideFold wide{};  // 16-bit floats: what to do with an addend that arrives
};

// What a send and a receive have in common.
struct Frame {
  std::uint32_t segment = 0;
  std::uint32_t segments = 1;  // into which the bytes between both ranks in this round are cut
  std::uint16_t round = 0;
  std::uint32_t start = 0;  // of the round, by schedule::starts_of()
  Range chunks;
  Range peers;              // one for a receive; all readers of the same bytes for a send
  std::uint64_t bytes = 0;  // payload, at most (exactly, unless the codec's size varies)
};

struct SendFrame : Frame {
  std::uint32_t after_receives = 0;  // so many must have landed
  bool sends_sum = false;            // of plain addends, which the last of those completes
};

struct ReceiveFrame : Frame {
  std::uint32_t after_sends = 0;  // so many must be staged
  // Plain folds: how many frames, from this one on, add to the same elements one after the other.
  std::uint32_t addends = 0;
};

// All frames of a plan, each kind in wavefront order, and what they refer to.
struct PlanFrames {
  std::vector<SendFrame> sends;
  std::vector<ReceiveFrame> receives;
  std::vector<Chunk> chunks;
  std::vector<Rank> peers;
  std::size_t most_bytes = 0;    // of any frame
  std::size_t most_addends = 0;  // of any frame
  // The float32 sums of 16-bit floats: how many lie side by side, and the elements of the largest.
  std::size_t wide_places = 0;
  std::size_t wide_elements = 0;
};

// Everything that determines a Plan, besides the schedule.
struct Binding {
  OpSpec spec;
  std::vector<std::uint64_t> counts;  // of each array, as far as this rank knows them
  // True if all ranks know all counts, and cut every chunk of the schedule into as many chunks.
  // Otherwise (gather, scatter, all_to_all) each is cut by its own size, which both its ends know.
  bool uniform_segments = true;
  Rank rank = 0;
  std::shared_ptr<const codec::Codec> codec;
  bool in_tree = false;  // from schedule::verify's report
  // The schedule is an all_gather of the ranks' inputs, end to end, and the operation adds them up.
  bool folds = false;
  std::size_t max_message = 0;    // bytes, frame header included
  std::vector<int> link_of;       // by peer; peers with the same number can share staging
  std::vector<int> site_of = {};  // by rank; empty: all ranks at one site
  std::size_t segment_bytes = 0;  // 0: chosen from the chunk's size

  bool is_lossy() const noexcept { return codec->combine() != codec::Combine::kPlain; }
  // Returns whether what goes between the two ranks is encoded.
  bool codes(Rank one, Rank other) const {
    return is_lossy() && (!codec->between_sites() || site_of.at(at(one)) != site_of.at(at(other)));
  }
  // Returns what avg divides by: the number of ranks; 1 for every other op.
  int divisor(int ranks) const noexcept {
    return reduces(spec.collective) && spec.op == ReduceOp::kAvg ? ranks : 1;
  }
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
  bool lossy() const noexcept { return binding_.is_lossy(); }
  // Returns whether frames may travel packed (codec/lossless.h). They are planned as if they did
  // not, so that sums have the same bits.
  bool packs() const noexcept {
    return codec().definition().kind == codec::Definition::Kind::kLossless &&
           codec::packs(spec().dtype);
  }
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
  std::uint64_t bytes_to(Rank peer) const;
  std::uint64_t bytes_from(Rank peer) const;

  const std::vector<SendFrame>& sends() const noexcept { return frames_.sends; }
  const std::vector<ReceiveFrame>& receives() const noexcept { return frames_.receives; }
  std::span<const Chunk> chunks(const Frame& frame) const {
    return view(frames_.chunks, frame.chunks);
  }
  std::span<const Span> spans(const Chunk& chunk) const { return view(spans_, chunk.spans); }
  std::span<const Rank> peers(const Frame& frame) const { return view(frames_.peers, frame.peers); }

  // For lossy codecs: where a payload lies in the store, how many there are, and the bytes of all.
  std::size_t store_offset(std::uint32_t index) const { return store_offsets_[index]; }
  std::size_t stored_chunks() const noexcept { return store_offsets_.size(); }
  std::size_t store_bytes() const noexcept { return store_bytes_; }

  // Where a float32 sum lies, and how many elements such sums take in all.
  std::size_t wide_offset(const WideFold& fold) const noexcept {
    return fold.place * frames_.wide_elements;
  }
  std::size_t wide_elements() const noexcept { return frames_.wide_places * frames_.wide_elements; }

  // Returns the bytes of the largest payload, at most.
  std::size_t most_bytes() const noexcept { return frames_.most_bytes; }
  // Returns the most addends of any frame.
  std::size_t most_addends() const noexcept { return frames_.most_addends; }

  // Returns what avg divides by: the number of ranks; 1 for every other op.
  int divisor() const noexcept { return divisor_; }
  // Returns the results that this rank neither sends nor receives in finished form, to be finished
  // when everything has landed. Empty if nothing is to be done for them.
  const std::vector<Span>& finished_here() const noexcept { return finished_here_; }

 private:
  Binding binding_;
  std::uint32_t fingerprint_;
  std::string text_;
  int divisor_;
  int segments_ = 1;
  PlanFrames frames_;
  std::vector<Span> spans_;
  std::vector<std::size_t> store_offsets_;
  std::size_t store_bytes_ = 0;
  std::vector<Span> finished_here_;
};

}  // namespace gradwire::exec
