// Calls by the collectives of the library between the GPUs, NCCL's own, in place of schedules:
// algorithm="nccl", and "auto" where they can. One kernel takes the place of a launch and a group
// of messages for each round. Results have the same bits on all ranks, but not those of CPUs.
#pragma once

#include <string_view>
#include <vector>

#include "gradwire/cuda/gpu_communicator.h"
#include "gradwire/cuda/messages/native_collective.h"

namespace gradwire::cuda {

inline constexpr std::string_view kNcclAlgorithm = "nccl";

// Returns whether a call is made by native collectives, which all ranks decide alike. Throws
// ScheduleError where the caller wants them and they cannot make it.
bool is_native(const exec::Request& request, int size, const Messages& messages,
               const Feedback* feedback);

class NativeCall {
 public:
  explicit NativeCall(Communicator& of);
  void run(Call& call);
  // Bytes that this rank's calls would have sent in rings; what NCCL sent is not known.
  std::uint64_t sent() const noexcept { return sent_; }

 private:
  void bind(const Call& call);
  void bind_blocks(const Call& call, NativeCollective collective);
  void bind_arrays(const Call& call, NativeCollective collective);
  void deliver_residuals(Call& call);
  void check_results(const Call& call);
  void copy_blocks(const Call& call, std::span<const exec::Array> blocks, bool in);

  Communicator& of_;
  Room scratch_;  // of blocks that do not lie one after the other
  std::vector<NativeCollective> collectives_;
  std::uint64_t sent_ = 0;
};

}  // namespace gradwire::cuda
