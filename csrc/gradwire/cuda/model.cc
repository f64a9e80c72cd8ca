#include "gradwire/cuda/model.h"

#include "gradwire/exec/plan/plan_cache.h"

namespace gradwire::cuda {

schedule::CostModel gpu_model() {
  schedule::CostModel model;
  model.within = {5e-7, 1e-6, 5e-12, 1e-12};   // NVLink or PCIe: 200 GB/s
  model.between = {1e-6, 1e-5, 4e-11, 1e-12};  // 25 GB/s
  model.call = 2e-5;
  model.round = 3e-5;  // a group of messages, for which NCCL makes a thread, and the kernels
  model.move = 5e-13;  // memory of 2 TB/s and more
  model.gamma = 1e-12;
  model.turn = 0;
  model.cores = 1024;  // no rank waits for another one's kernels
  model.codecs = exec::built_in_model("shm", "tcp", model.cores).codecs;
  for (auto& [name, cost] : model.codecs) cost = {1e-12, 1e-12};
  return model;
}

}  // namespace gradwire::cuda
