// Execution on a GPU, which reads a Plan as the CPU's does (exec/plan/plan.h). Each round is one
// group of messages and the kernels that make its payloads and land them, all enqueued on one
// stream. Nothing here waits, and nothing is allocated unless a plan needs more room than any
// before.
//
//   round:  encode what is sent · one group of messages · fold, or decode, what has arrived
//
// Stream order ensures that sends read what was there when the round began, and that landings come
// after. The plan has one segment, since on a GPU it is streams that overlap.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "gradwire/cuda/device.h"
#include "gradwire/cuda/gpu_codec.h"
#include "gradwire/cuda/messages/messages.h"
#include "gradwire/exec/plan/plan.h"

namespace gradwire::cuda {

// The error feedback of an extent, for lossy codecs.
struct ExtentFeedback {
  RunFeedback run_feedback{};  // at its first element
  std::uint64_t call = 0;      // for Int8Rounding
  std::uint64_t element = 0;   // index of its first element in its key
};

class Execution {
 public:
  struct Call {
    const exec::Plan* plan = nullptr;
    std::span<std::byte* const> extents;              // in device memory
    const Codec* codec = nullptr;                     // null where the plan is not lossy
    std::span<const ExtentFeedback> extent_feedback;  // lossy: one per extent
    std::byte* scratch = nullptr;                     // the codec's
    std::uint32_t* flags = nullptr;                   // lossy: the call's
    std::span<const Slotted> layout;  // plain: the layout of every block, which is a payload
    bool captured = false;            // captured in a graph
  };

  explicit Execution(const Api& api) : api_(api), arena_(api), store_(api), wide_(api) {}

  // Throws what the messages throw; then the results are undefined.
  void run(const Call& call, Messages& messages, Stream stream);
  // Returns how many bytes were posted so far; slots count whole.
  std::uint64_t sent() const noexcept { return sent_; }

 private:
  using Frames = std::span<const exec::Frame>;
  struct Landing {
    const exec::Part* part = nullptr;
    const exec::Piece* piece = nullptr;  // plain: the one piece that lands
    const std::byte* data = nullptr;
  };

  bool lossy() const { return call_.codec != nullptr; }
  void reserve();
  template <typename Visit>
  void each_round(Visit visit) const;

  void run_round(Frames sends, Frames receives);
  void post_send(const exec::Part& part, std::span<const Rank> peers);
  void send(const std::byte* data, std::size_t bytes, std::span<const Rank> peers,
            std::span<const Slotted> layout);
  void post_receive(const exec::Part& part, Rank peer, Frames sends);
  const std::byte* payload_to_send(const exec::Part& part);
  void finish(const exec::Part& part);
  void land(const Landing& landing);
  void land_plain(const exec::Part& part, const exec::Piece& piece, const std::byte* data);
  void fold_wide(const exec::Part& part, const exec::Piece& piece, const std::byte* data);
  void land_lossy(const exec::Part& part, const std::byte* data);
  void finish_here(const exec::Piece& piece);
  void scale(const exec::Piece& piece);

  bool is_sent(const exec::Part& part, Frames sends) const;
  std::size_t payload_bytes(const exec::Part& part) const;
  std::span<const Slotted> layout_of(const exec::Part& part);
  std::byte* take(std::size_t bytes);
  std::byte* stored(const exec::Part& part) { return store_.data() + store_offsets_[part.stored]; }
  Run run_of(const exec::Piece& piece) const;
  std::size_t bytes_of(const exec::Piece& piece) const;
  std::byte* address(const exec::Piece& piece) const;
  float* floats(const exec::Piece& piece) const;

  const Api& api_;
  Room arena_, store_, wide_;
  Call call_;
  Messages* messages_ = nullptr;
  Stream stream_ = nullptr;
  std::size_t used_ = 0;  // bytes of the arena that this round uses
  std::uint64_t sent_ = 0;
  std::vector<std::size_t> store_offsets_;
  std::vector<Landing> landings_;
  std::vector<Slotted> layout_;
};

}  // namespace gradwire::cuda
