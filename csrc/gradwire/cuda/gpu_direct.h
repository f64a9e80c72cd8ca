// An all_reduce in a codec as two operations of the library between the GPUs, with the payloads and
// additions of the schedule `direct`, and so its bits:
//
//   encode the other ranks' chunks | all-to-all | add what came to the own chunk, encode, decode |
//   all-gather | decode the other ranks' chunks
//
// The kernels are three, for each kMostSpans spans, where one kernel of the codec adds and
// finishes. Both operations take chunks of one size, so that each has room for the longest payload.
#pragma once

#include "gradwire/cuda/gpu_execution.h"

namespace gradwire::cuda {

class DirectExchange {
 public:
  DirectExchange(const Api& api, Rank rank, int size);

  // Returns whether run() can make this call in place of GpuExecution::run(). All ranks get the
  // same answer.
  bool can_run(const GpuExecution::GpuCall& call, const Messages& messages) const;
  // Throws what the messages throw; then the results are undefined.
  void run(const GpuExecution::GpuCall& call, Messages& messages, const CallStream& stream);
  // Returns how many bytes were posted so far for other ranks; chunks count whole.
  std::uint64_t sent() const noexcept { return sent_; }

 private:
  void find_chunks(const exec::Plan& plan);
  void list_spans(const GpuExecution::GpuCall& call);
  GpuPayloads received() const;

  const Rank rank_;
  const int size_;
  Room payloads_, received_;
  std::size_t chunk_bytes_ = 0;
  std::vector<std::vector<exec::Span>> chunks_;  // by the rank that owns them
  std::vector<GpuSpan> own_, others_;
  std::uint64_t sent_ = 0;
};

}  // namespace gradwire::cuda
