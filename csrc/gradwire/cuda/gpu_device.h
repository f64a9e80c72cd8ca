// GpuDevice: the steps of calls on a GPU (exec/program/program.h), enqueued on the call's stream.
// Kernels take lists of spans. A CPU decides after a call whether residuals move; here the device
// decides it, by the call's word of flags. It is reused from call to call; enqueued work uses its
// memory in stream order.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "gradwire/cuda/gpu_feedback.h"
#include "gradwire/cuda/gpu_native.h"
#include "gradwire/cuda/gpu_operation.h"
#include "gradwire/exec/program/program.h"

namespace gradwire::cuda {

class GpuDevice final : public exec::Device {
 public:
  // All must outlive it, and what is enqueued.
  GpuDevice(const Api& api, Rank rank, int size, Messages& messages, exec::PlanCache& plans);

  // Prepares a call and enqueues nothing. The request must live until run() returns. Throws
  // InvalidArgument and ScheduleError for what run() could not do.
  void bind(const exec::Request& request, const exec::Decision& decision, GpuFeedback* feedback,
            const CallStream& stream);
  // Enqueues the call. Throws what the messages throw.
  void run();
  const CallStream& stream() const noexcept { return stream_; }
  // Returns the Flag bits of all calls that are over, and clears them.
  std::uint32_t take_flags();
  // Returns how many bytes this rank's calls have sent.
  std::uint64_t sent() const noexcept { return operation_.sent() + native_.sent(); }

 private:
  const exec::Request* run_plan() override;
  const exec::Request* exchange_lengths() override { return nullptr; }  // slots make them alike
  const exec::Request* exchange_payloads() override;
  const exec::Request* vote() override;
  void run_native() override;
  void deliver(std::span<const exec::SummedArray> arrays) override;
  void mark(std::span<const exec::SummedArray> arrays) override;
  void average(std::span<const exec::SummedArray> arrays) override;
  void encode(std::span<const exec::SummedArray> arrays) override;
  void add_up(std::span<const exec::SummedArray> arrays) override;
  FactorRoom take_factor_room(std::size_t left, std::size_t right) override;
  void make_left(std::span<const exec::Matrix> matrices) override;
  bool make_right(std::span<const exec::Matrix> matrices) override;
  void multiply(std::span<const exec::Matrix> matrices) override;
  void finish() override;

  void begin();
  void bind_feedback();
  void bind_keys();
  const GpuCodec* codec_for(const std::shared_ptr<const codec::Codec>& codec);
  void run_phase(const exec::Request& phase, std::span<const Slotted> layout);
  void prepare(std::span<const GpuSpan> spans);
  void adapt();
  void place_payloads();
  const exec::Request& payload_phase();
  exec::Request plan_request() const;
  void remember(std::span<const exec::Matrix> matrices);
  void list_matrices(std::span<const exec::Matrix> matrices);
  void look_for_failure();
  void poison();
  std::span<const GpuSpan> spans_of(std::span<const exec::SummedArray> arrays);
  std::span<const exec::SummedArray> at(std::span<std::byte* const> places);
  bool averages() const { return program_.request().op == ReduceOp::kAvg; }
  std::size_t size() const { return static_cast<std::size_t>(program_.request().size); }
  std::size_t rank() const { return static_cast<std::size_t>(program_.request().rank); }

  const Api& api_;
  exec::Program program_;
  GpuOperation operation_;
  NativeCall native_;
  struct Rooms {
    Room flags, reported, key_states, scratch, payloads, factors;
  } rooms_;
  std::uint32_t* own_flags_ = nullptr;
  // Pinned: the flags of all calls since take_flags(). A bit that the device sets meanwhile may be
  // returned twice, but is never lost.
  std::uint32_t* reported_ = nullptr;
  std::uint32_t* lost_ = nullptr;  // pinned; set to kLost once messages have failed
  std::map<std::shared_ptr<const codec::Codec>, std::unique_ptr<const GpuCodec>> codecs_;
  std::uint64_t operations_ = 0;

  // Of the call that is being enqueued.
  CallStream stream_;
  GpuFeedback* feedback_ = nullptr;
  const GpuFeedback::KeyTable* table_ = nullptr;  // with feedback
  std::vector<ArrayFeedback> array_feedback_;     // of each array
  const GpuCodec* codec_ = nullptr;               // of the payloads; null where there are none
  std::byte* scratch_ = nullptr;                  // the codec's
  std::uint32_t* flags_ = nullptr;
  bool has_voted_ = false;
  exec::Request phase_;
  exec::Array word_;  // of the vote
  std::vector<exec::SummedArray> own_;
  std::vector<GpuSpan> spans_;
  // Gathered payloads: a block for each rank, in which each array has a place.
  struct Gathered {
    std::size_t block_bytes = 0;
    std::vector<exec::Array> blocks;
    std::vector<std::size_t> places;
    std::vector<Slotted> layout;
  } gathered_;
  struct LowRank {
    std::size_t left = 0, right = 0;  // elements of the factors
    double* columns = nullptr;
    FactorRoom room;
    float* scales = nullptr;
    std::vector<GpuMatrix> matrices;
  } low_rank_;
};

}  // namespace gradwire::cuda
