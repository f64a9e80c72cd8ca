// A sum of gathered payloads on a GPU (exec/compound/gather_reduce.h): every rank encodes its whole
// input once, receives the payloads of all ranks, and adds them up in the order of the ranks.
#pragma once

#include <vector>

#include "gradwire/cuda/gpu_communicator.h"

namespace gradwire::cuda {

class GatherReduce {
 public:
  explicit GatherReduce(Communicator& of);
  void run(Call& call);
  std::uint64_t sent() const noexcept { return operation_.sent(); }

 private:
  void place(const Call& call);
  void deliver_alone(const Call& call);
  void list_runs(const Call& call);
  void list_results(const Call& call);
  void add_up(const Call& call);
  const float* input(const Call& call, std::size_t extent) const;
  float* output(const Call& call, std::size_t extent) const;
  void mark(const Call& call);

  Communicator& of_;
  Operation operation_;
  Room payloads_;                     // a block for each rank
  std::vector<std::size_t> offsets_;  // elements: where each extent begins in its array
  std::size_t runs_ = 1;              // extents per array
  std::size_t block_bytes_ = 0;
  std::vector<Slotted> layout_;  // of a block
  std::vector<Run> all_runs_, results_;
};

}  // namespace gradwire::cuda
