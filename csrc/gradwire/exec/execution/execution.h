// Execution: one run of a Plan over one set of buffers. It never blocks: advance() does what can be
// done now and returns whether that was anything. It is reused from call to call, and allocates
// only when a plan is larger than any before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "gradwire/base/copy.h"
#include "gradwire/base/error.h"
#include "gradwire/base/wire.h"
#include "gradwire/exec/control/observer.h"
#include "gradwire/exec/execution/feedback_view.h"
#include "gradwire/exec/execution/links.h"
#include "gradwire/exec/execution/traffic.h"
#include "gradwire/exec/plan/plan.h"

namespace gradwire::exec {

class Execution {
 public:
  struct Call {
    const Plan* plan = nullptr;
    std::span<std::byte* const> arrays;  // the address of each; null where this rank has none
    // Lossy codecs: one context per array; empty: none.
    std::span<const codec::EncodeContext> contexts;
    Rank rank = 0;
    std::uint32_t communicator = 0;
    std::uint32_t operation = 0;
    std::uint32_t fingerprint = 0;  // in all headers; 0: the plan's
    std::uint16_t requests = 0;     // FrameFlags: what this rank asks of all ranks
    Observer* observer = nullptr;   // of frames; null: none
  };

  // Starts a run. The spans must stay as they are until it is over.
  void start(const Call& call);
  bool advance(Links& links, TrafficCounter& traffic);
  bool done() const noexcept {
    return sent_ == call_.plan->sends().size() && landed_ == call_.plan->receives().size() &&
           ended_;
  }
  // Returns, for lossy codecs when done, whether this rank's results hold neither NaN nor Inf.
  // Ranks that all have all results return the same.
  bool finite() const noexcept { return finite_; }
  // Returns, when done, the FrameFlags that this rank or one whose data it has received asks of
  // all. After a plan that confirms all ranks, all ranks return the same.
  std::uint16_t requests() const noexcept { return call_.requests; }
  // Returns the time spent in the codec since it was last set to zero, which the caller may do.
  CodecTime& codec_time() noexcept { return spent_; }
  // Returns the rank that this one waits for: the sender of the next frame, or a reader of a full
  // staging.
  Rank waiting_for() const noexcept;
  const Frame* waiting_frame() const noexcept;
  // Returns whether that rank must read what was sent to it; otherwise it must send.
  bool waits_for_reader() const noexcept {
    const auto& receives = call_.plan->receives();
    return landed_ == receives.size() || sent_ < receives[landed_].after_sends;
  }

 private:
  // What of a staged frame goes into its header.
  struct Staged {
    std::size_t bytes = 0;
    std::uint16_t flags = 0;
  };

  bool try_send(Links& links, TrafficCounter& traffic);
  bool try_receive(Links& links, TrafficCounter& traffic);
  bool try_fold(Links& links, TrafficCounter& traffic);
  bool try_end(Links& links);
  // Report to the observer. note_wait() returns false: nothing has moved.
  bool note_wait(Rank peer, bool reads) const noexcept {
    if (call_.observer != nullptr) call_.observer->awaits(peer, reads);
    return false;
  }
  void note_work() const noexcept {
    if (call_.observer != nullptr) call_.observer->moves();
  }

  FrameHeader header_of(const Frame& frame) const;
  void check(FrameHeader header, const Frame& frame, Rank peer, ConstBytes payload);
  bool fits(const Frame& frame, bool is_packed, std::size_t bytes) const;
  TransportError undecodable(Rank peer, const InvalidArgument& error) const;
  [[noreturn]] void throw_size(const FrameHeader& header, const Frame& frame, Rank peer) const;

  std::optional<ConstBytes> arrived(const Frame& frame, Links& links);
  ConstBytes unpacked(const Frame& frame, ConstBytes packed, Rank peer);
  Bytes reserve(const Frame& frame, Links& links);
  void commit(const Frame& frame, Bytes staging, Staged staged, Links& links,
              TrafficCounter& traffic);
  const SendFrame* send_of_sum(std::size_t landed) const;
  void fold(const Frame& frame, std::byte* out);

  Staged stage_packed(const Frame& frame, Bytes out);
  Staged pack(ConstBytes plain, Bytes out);
  std::size_t stage(const Frame& frame, Bytes out);
  std::size_t stage_chunk(const Chunk& chunk, Bytes out);
  void finish(const Chunk& chunk);
  void land(const Frame& frame, ConstBytes in, Rank peer);
  std::size_t land_chunk(const Chunk& chunk, ConstBytes in);
  std::size_t land_wide(const Chunk& chunk, ConstBytes in);
  std::size_t land_plain(const Chunk& chunk, const Span& span, ConstBytes in);
  std::size_t land_coded(const Chunk& chunk, const Span& span, ConstBytes in);
  std::size_t encode(const Span& span, bool coded, Bytes out);
  std::size_t decode(const Span& span, ConstBytes in);
  codec::EncodeContext context_of(const Span& span) const;
  Bytes store_of(const Chunk& chunk);
  void finish_here(const Span& span);
  void scale(const Span& span);

  std::size_t bytes_of(const Span& span) const {
    return span.count * size_of(call_.plan->spec().dtype);
  }
  std::byte* address(const Span& span) const;
  float* floats(const Span& span) const;

  Call call_;
  Copy copy_ = copy_cached;        // how to copy into the frame that is staged
  bool packs_ = false;             // whether that frame is packed, where that makes it smaller
  std::size_t arrived_bytes_ = 0;  // of the last frame that has arrived, as it was on the wire
  std::size_t sent_ = 0;
  std::size_t landed_ = 0;
  bool ended_ = false;
  bool finite_ = true;
  CodecTime spent_;
  std::vector<const std::byte*> addends_;    // of one fold, in their order
  std::vector<std::byte> to_pack_;           // a frame's payload
  std::vector<std::byte> unpacked_;          // likewise
  std::vector<std::byte> store_;             // finished payloads, forwarded unchanged
  std::vector<float> wide_;                  // unfinished sums of 16-bit floats
  std::vector<std::uint32_t> stored_bytes_;  // of each payload in the store
};

}  // namespace gradwire::exec
