// The part of a communicator on one rank's GPU. It makes the same calls as exec/communicator.h, on
// arrays in device memory, enqueued on the caller's stream. A call returns once it is enqueued;
// later work on the stream finds its results. A repeated call waits for nothing and allocates
// nothing, so it can be captured in a CUDA graph.
//
// Calls run in the order in which they are made, on whatever streams. Calls of one capture are
// ordered among themselves; whoever launches the graph orders it with other calls, since they use
// the same memory. One thread at a time may use it; any thread may call abort().
//
// A call whose messages fail still ends: its results are undefined, and residuals are as they were
// before it.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "gradwire/cuda/gpu_feedback.h"
#include "gradwire/cuda/gpu_operation.h"
#include "gradwire/exec/execution/key_offsets.h"

namespace gradwire::cuda {

class GatherReduce;
class LowRankReduce;
class NativeCall;

// A call that is being enqueued.
struct Call {
  const exec::Request* request = nullptr;
  Stream stream = nullptr;
  bool captured = false;
  std::vector<std::uint64_t> counts;  // exec::extent_counts
  const Codec* codec = nullptr;       // of the payloads; null where there are none
  std::byte* scratch = nullptr;       // the codec's
  std::uint32_t* flags = nullptr;
  Feedback* feedback = nullptr;
  const Feedback::Table* table = nullptr;       // with feedback
  std::vector<exec::KeyOffset> keys;            // with feedback: key and offset of each extent
  std::vector<ExtentFeedback> extent_feedback;  // of each extent
};

class Communicator {
 public:
  struct Setting {
    Rank rank = 0;
    int size = 1;
    std::vector<std::vector<Rank>> hosts;
    int device = 0;
  };

  // Works on the setting's device, to which the messages belong.
  Communicator(const Api& api, Setting setting, std::unique_ptr<Messages> messages);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Enqueues a call. The arrays of `request` are in this device's memory; its `feedback` is
  // ignored, and `feedback` is used. Throws InvalidArgument and ScheduleError as a call on the CPU
  // does, before anything is enqueued; and what the messages throw, which every later call throws
  // again.
  void run(const exec::Request& request, Feedback* feedback, Stream stream);

  // Where a call is enqueued.
  struct Place {
    Stream stream = nullptr;
    std::uint64_t capture = 0;  // of the stream (cuda::capture_of)
    Event end = nullptr;        // recorded at the call's end, outside of captures; null: an own one
  };
  // Does the same for a request that require_valid() has accepted, on a thread whose device is the
  // setting's. `end` must stay until another call has ended.
  void enqueue(const exec::Request& request, Feedback* feedback, const Place& place);

  // Throws what run() would throw for an invalid request, and does nothing else.
  void require_valid(const exec::Request& request, const Feedback* feedback);

  // Returns, and clears, the Flag bits of the calls that are over, however many.
  std::uint32_t take_flags();

  // Decides by this model from now on. The ranks must agree.
  void set_model(schedule::CostModel model) { plans_.set_model(std::move(model)); }

  // Returns how many bytes this rank's calls have sent, without replays of graphs.
  std::uint64_t sent() const noexcept { return sent_; }

  int device() const noexcept { return setting_.device; }
  std::string_view messages() const noexcept { return messages_->name(); }
  const Api& api() const noexcept { return api_; }
  // Throws if the messages between the GPUs have failed.
  void check_messages() { messages_->check(); }
  void abort() noexcept { messages_->abort(); }

 private:
  friend class GatherReduce;
  friend class LowRankReduce;
  friend class NativeCall;

  void begin(Call& call);
  void bind_feedback(Call& call);
  void bind_keys(Call& call);
  exec::Request chosen(const exec::Request& request) const;
  void run_at_once(Call& call);
  void deliver_residuals(const Call& call, const exec::BufferMap& buffer_map);
  void check_results(const Call& call, const exec::BufferMap& buffer_map);
  void prepare(const Call& call, std::span<std::byte* const> extents);
  void adapt(const Call& call);
  void count_sent();
  // Ends a call with feedback. `shared`: all ranks have all results, and so the same flags.
  void settle(const Call& call, bool shared, bool remembers = false);
  void vote_finite(const Call& call);
  void poison(const Call& call);
  const Codec* codec_for(const std::shared_ptr<const codec::Codec>& codec);

  const Api& api_;
  const Setting setting_;
  std::unique_ptr<Messages> messages_;
  exec::PlanCache plans_;
  Operation main_, vote_;
  Room flags_room_, own_key_states_, codec_scratch_, told_room_;
  std::uint32_t* flags_ = nullptr;
  // Pinned. The flags of all calls since take_flags(): bits that the device has just set may come
  // again, and none is lost.
  std::uint32_t* told_ = nullptr;
  std::uint32_t* lost_ = nullptr;  // pinned; set to kLost once messages have failed
  OwnedEvent last_, last_captured_;
  Event latest_ = nullptr;          // at the last call's end; null: there was none
  std::uint64_t last_capture_ = 0;  // the capture of last_captured_
  std::uint64_t operations_ = 0;
  std::atomic<std::uint64_t> sent_{0};
  Call call_;
  std::map<std::shared_ptr<const codec::Codec>, std::unique_ptr<const Codec>> codecs_;
  std::unique_ptr<GatherReduce> gather_;
  std::unique_ptr<LowRankReduce> lowrank_;
  std::unique_ptr<NativeCall> native_;
};

}  // namespace gradwire::cuda
