// GpuExecution: enqueues a plan (exec/plan/plan.h) on a stream. Each round is one group of
// messages, one for each frame, and few kernels, each over all spans of the round. It never waits,
// and allocates only if a plan needs more room than any before.
//
//   round:  land what the round before brought · encode what is sent · one group of messages
//
// What has arrived is landed with the next round's kernels, so that one kernel adds, finishes and
// encodes. Stream order ensures that sends read what was there when the round began, and that
// landings come after. The plan has one segment, since on a GPU it is streams that overlap.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "gradwire/cuda/device.h"
#include "gradwire/cuda/gpu_codec.h"
#include "gradwire/cuda/messages/messages.h"
#include "gradwire/exec/plan/plan.h"

namespace gradwire::cuda {

// The error feedback of an array, for lossy codecs.
struct ArrayFeedback {
  SpanFeedback span_feedback{};  // at its first element
  std::uint64_t call = 0;        // for Int8Rounding
  std::uint64_t element = 0;     // index of its first element in its key
};

class GpuExecution {
 public:
  struct GpuCall {
    const exec::Plan* plan = nullptr;
    std::span<std::byte* const> arrays;             // in device memory
    const GpuCodec* codec = nullptr;                // null where the plan is not lossy
    std::span<const ArrayFeedback> array_feedback;  // lossy: one per array
    std::byte* scratch = nullptr;                   // the codec's
    std::uint32_t* flags = nullptr;                 // lossy: the call's
    std::span<const Slotted> layout;  // plain: of each block that is gathered, if it is a payload
  };

  explicit GpuExecution(const Api& api) : api_(api), arena_(api), store_(api), wide_(api) {}

  // Throws what the messages throw; then the results are undefined.
  void run(const GpuCall& call, Messages& messages, const CallStream& stream);
  // Returns how many bytes were posted so far; slots count whole.
  std::uint64_t sent() const noexcept { return sent_; }

 private:
  using Sends = std::span<const exec::SendFrame>;
  using Receives = std::span<const exec::ReceiveFrame>;

  // A chunk that has arrived in the arena and is not landed yet: `addends` of it, `stride` bytes
  // apart, which are added one after the other; or, with 0 addends, one that is copied.
  struct ArrivedChunk {
    const exec::Chunk* chunk = nullptr;
    const exec::Chunk* last = nullptr;  // of the last addend
    std::size_t at = 0;                 // bytes: where the first message of it lies in the arena
    std::size_t stride = 0;
    int addends = 0;
    bool taken = false;  // an encoder has added it, or it is landed
  };
  // What is alike in all spans of one launch.
  struct Launch {
    std::size_t stride = 0;
    int addends = 0;
    bool finishes = false;
    bool operator==(const Launch&) const = default;
    GpuPayloads payloads(const std::byte* arena) const {
      return {arena, static_cast<std::int64_t>(stride), addends};
    }
  };

  bool lossy() const { return call_.codec != nullptr; }
  void reserve();
  void place_store();
  template <typename Visit>
  void each_round(Visit visit) const;
  void run_round(Sends sends, Receives receives);

  void place_sends(Sends sends);
  void encode_sends(Sends sends);
  void encode(const exec::Chunk& chunk, std::size_t at, const Launch& launch);
  void start_encoding();
  void pack_sends(Sends sends);
  void pack(const exec::Frame& frame, std::size_t at);
  void send(const exec::Frame& frame, const std::byte* data);

  void receive(const exec::Frame& frame, Sends sends);
  void note(const exec::Chunk& chunk, std::size_t at);
  ArrivedChunk* pending(const exec::Chunk& chunk);
  void land_pending(Sends sends, bool averages);
  void land(const ArrivedChunk& landing, bool averages);
  void fold_wide(const ArrivedChunk& landing);
  void start_landing();

  void average(Sends sends);
  void decode_results();
  void finish_here(bool is_averaged);
  void fold(const Launch& launch);

  bool averages_with_folds() const;
  bool is_finished(const exec::Chunk& chunk, Sends sends);
  bool are_finished_here() const;
  bool is_sent(const exec::Frame& frame, Sends sends) const;
  bool is_copied(const exec::Frame& frame) const;
  std::size_t payload_bytes(const exec::Chunk& chunk) const;
  std::size_t frame_bytes(const exec::Frame& frame) const;
  std::byte* range_of(const exec::Frame& frame) const;
  std::span<const Slotted> layout_of(const exec::Frame& frame);
  std::size_t take(std::size_t bytes);
  std::size_t bytes_of(const exec::Span& span) const;
  std::byte* address(const exec::Span& span) const;

  const Api& api_;
  Room arena_, store_, wide_;
  GpuCall call_;
  Messages* messages_ = nullptr;
  CallStream stream_;
  // The arena has two halves, which rounds take in turn, since what a round brings is landed in the
  // next one.
  std::size_t half_bytes_ = 0, used_ = 0;
  bool second_half_ = false;
  std::uint64_t sent_ = 0;
  std::vector<std::size_t> store_places_;   // of finished chunks, by their first span
  std::vector<const std::byte*> outgoing_;  // where the message of each send lies
  struct Arrivals {
    std::vector<ArrivedChunk> chunks;
    bool one_by_one = false;                 // whether their landings are
  } arrived_, pending_;                      // in this round, and in the one before
  std::vector<const exec::Chunk*> results_;  // in the store; they are decoded at the end
  Launch launch_;                            // that is being put together
  std::vector<GpuSpan> spans_;
  std::vector<FoldSpan> folds_;
  std::vector<WideSpan> wide_spans_;
  std::vector<Slotted> layout_;
};

// Returns a span of a lossy call as kernels take it, without its places in messages.
GpuSpan span_of(const GpuExecution::GpuCall& call, const exec::Span& span);

}  // namespace gradwire::cuda
