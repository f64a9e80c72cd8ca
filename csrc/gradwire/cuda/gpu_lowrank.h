// lowrank on a GPU (exec/compound/lowrank_reduce.h): local work, a sum of left factors, local work,
// a sum of right factors, local work; all of it is enqueued.
#pragma once

#include <vector>

#include "gradwire/codec/lowrank.h"
#include "gradwire/cuda/gpu_communicator.h"

namespace gradwire::cuda {

class LowRankReduce {
 public:
  explicit LowRankReduce(Communicator& of);
  void run(Call& call);
  std::uint64_t sent() const noexcept { return operation_.sent(); }

 private:
  struct Factored {
    std::size_t extent;
    Matrix of;
    std::size_t left, right;  // where its factors begin in lefts_ and rights_
    std::size_t key, memory;  // with feedback: its key, and its place in the key's memory
    std::size_t left_size() const { return of.rows * of.rank; }
    std::size_t right_size() const { return of.columns * of.rank; }
  };

  void list(const Call& call);
  void open(Call& call);
  void take_room(bool captured);
  void make_left(const Call& call);
  void make_right(const Call& call);
  void finish(const Call& call);
  void sum(const Call& call, const std::vector<exec::Array>& arrays);
  void list_for_kernels(const Call& call);
  Memory memory_of(const Call& call, const Factored& each) const;
  RunFeedback run_feedback_of(const Call& call, std::size_t extent) const;

  Communicator& of_;
  Operation operation_;
  std::vector<Factored> matrices_;
  std::vector<std::size_t> plain_;     // extents that are sent as they are
  std::vector<FactoredMatrix> given_;  // matrices_ and
  std::vector<Run> plain_runs_;        // plain_, as kernels take them
  std::size_t left_ = 0, right_ = 0;   // elements
  Room room_;
  float *lefts_ = nullptr, *rights_ = nullptr, *own_rights_ = nullptr, *scales_ = nullptr;
  double* columns_ = nullptr;
};

}  // namespace gradwire::cuda
