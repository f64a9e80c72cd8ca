// All_reduces by the schedule `direct` as one kernel, where the messages between the GPUs have one,
// and the codec: by algorithm="direct", and by "auto". The results have the bits of that schedule.
#pragma once

#include <cstdint>
#include <vector>

#include "gradwire/cuda/gpu_communicator.h"

namespace gradwire::cuda {

// Returns whether a call is made so, which all ranks decide alike. `codec`: null without one.
bool is_direct(const exec::Request& request, int size, const Messages& messages,
               const Feedback* feedback, const Codec* codec);

class DirectCall {
 public:
  explicit DirectCall(Communicator& of);
  void run(Call& call);
  // Bytes that this rank's calls would have sent by the schedule.
  std::uint64_t sent() const noexcept { return sent_; }

 private:
  void reduce(Call& call, const exec::Plan& plan);
  void list(const exec::Plan& plan, const Call& call);
  void add(const exec::Plan& plan, const exec::Frame& frame, int owner);

  Communicator& of_;
  std::vector<std::vector<exec::Piece>> pieces_;  // by owner
  std::vector<SummedRun> runs_;
  std::uint64_t sent_ = 0;
};

}  // namespace gradwire::cuda
