// What one rank's GPU holds of a communicator: the same calls as exec/communicator.h's, on arrays
// in device memory, enqueued on the caller's stream. A call returns when it is enqueued; what the
// stream does next finds its results. A repeated call waits for nothing and allocates nothing, so
// it can be captured in a CUDA graph.
//
// Calls are ordered as they are made, on whatever streams; those of one capture among themselves,
// and who launches a graph orders it with the rest, as they use the same memory. One thread at a
// time; abort() for any.
//
// A call whose messages fail is over all the same: its results may hold anything, and residuals are
// as they were before it.
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

// A call that is being enqueued.
struct Call {
  const exec::Request* request = nullptr;
  Stream stream = nullptr;
  bool captured = false;
  std::vector<std::uint64_t> counts;  // exec::extent_counts
  const Codec* codec = nullptr;       // of payloads
  std::byte* scratch = nullptr;       // the codec's
  std::uint32_t* flags = nullptr;
  Feedback* feedback = nullptr;
  const Feedback::Table* table = nullptr;       // with feedback
  std::vector<exec::KeyOffset> keys;            // with feedback: of each extent, in the table's
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

  // `request`'s arrays are in this device's memory; its `feedback` is not looked at, `feedback` is.
  // Throws InvalidArgument and ScheduleError as a call on the CPU does, before anything is
  // enqueued; and what the messages throw, after which every call throws it.
  void run(const exec::Request& request, Feedback* feedback, Stream stream);

  // Throws what run() would throw for a request that is wrong; nothing else is done.
  void require_valid(const exec::Request& request, const Feedback* feedback);

  // What became of the calls so far, as far as they are over: Flag bits, which the caller's next
  // look does not find again.
  std::uint32_t take_flags();

  // Bytes that this rank's calls have sent, replays of graphs not among them.
  std::uint64_t sent() const noexcept { return sent_; }

  int device() const noexcept { return setting_.device; }
  std::string_view messages() const noexcept { return messages_->name(); }
  const Api& api() const noexcept { return api_; }
  // Throws what has failed between the GPUs since.
  void check_messages() { messages_->check(); }
  void abort() noexcept { messages_->abort(); }

 private:
  friend class GatherReduce;
  friend class LowRankReduce;

  void begin(Call& call);
  void bind_feedback(Call& call);
  void bind_keys(Call& call);
  void run_at_once(Call& call);
  void deliver_residuals(const Call& call, const exec::BufferMap& buffer_map);
  void check_results(const Call& call, const exec::BufferMap& buffer_map);
  void prepare(const Call& call, std::span<std::byte* const> extents);
  void adapt(const Call& call);
  void count_sent();
  // The end of a call with feedback; `shared`: all ranks have all results, and so the same flags.
  void settle(const Call& call, bool shared, bool remembers = false);
  void vote_finite(const Call& call);
  void poison(const Call& call);
  const Codec* codec_for(const std::shared_ptr<const codec::Codec>& codec);

  const Api& api_;
  const Setting setting_;
  std::unique_ptr<Messages> messages_;
  exec::PlanCache plans_;
  Operation main_, vote_;
  Room flags_room_, own_key_states_, codec_scratch_, call_flags_;
  std::uint32_t* flags_ = nullptr;
  std::uint32_t* lost_ = nullptr;  // pinned: kLost, once messages have failed
  OwnedEvent last_, last_captured_;
  bool recorded_ = false;           // last_
  std::uint64_t last_capture_ = 0;  // of last_captured_
  std::uint64_t operations_ = 0;
  std::atomic<std::uint64_t> sent_{0};
  Call call_;
  std::map<std::shared_ptr<const codec::Codec>, std::unique_ptr<const Codec>> codecs_;
  std::unique_ptr<GatherReduce> gather_;
  std::unique_ptr<LowRankReduce> lowrank_;
};

}  // namespace gradwire::cuda
