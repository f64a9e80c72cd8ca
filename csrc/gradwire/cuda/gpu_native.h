// Calls by the collectives of the library between the GPUs, NCCL's own, in place of schedules:
// algorithm="nccl", and "auto" where they can (exec/plan/method.h). One kernel takes the place of a
// launch and a group of messages for each round. Results have the same bits on all ranks, but not
// those of CPUs.
#pragma once

#include <vector>

#include "gradwire/cuda/device.h"
#include "gradwire/cuda/messages/messages.h"
#include "gradwire/exec/plan/request.h"

namespace gradwire::cuda {

class NativeCall {
 public:
  NativeCall(const Api& api, Messages& messages) : api_(api), messages_(messages), scratch_(api) {}

  // Enqueues a call. `in_place`: the inputs have been copied to the outputs. Throws what the
  // messages throw.
  void run(const exec::Request& request, bool in_place, const CallStream& stream);
  // Bytes that this rank's calls would have sent in rings; what NCCL sent is not known.
  std::uint64_t sent() const noexcept { return sent_; }

 private:
  void bind_blocks(const exec::Request& request, NativeCollective collective,
                   const CallStream& stream);
  void bind_arrays(const exec::Request& request, NativeCollective collective, bool in_place);
  void copy_blocks(std::span<const exec::Array> blocks, std::size_t bytes, bool in, Stream stream);

  const Api& api_;
  Messages& messages_;
  Room scratch_;  // of blocks that do not lie one after the other
  std::vector<NativeCollective> collectives_;
  std::uint64_t sent_ = 0;
};

}  // namespace gradwire::cuda
