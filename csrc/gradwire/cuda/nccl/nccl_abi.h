// The part of NCCL's binary interface that gradwire uses, declared here: the library is loaded at
// run time, and its header is not needed to build. It is the same in NCCL 2.19 to 2.32;
// tests/cpp/cuda/cuda_nccl_abi_test.cc compares it with <nccl.h> where that is installed.
#pragma once

#include <array>
#include <climits>
#include <cstddef>

#include "gradwire/cuda/api.h"

namespace gradwire::cuda::nccl {

struct Comm;  // what ncclComm_t points to

using UniqueId = std::array<char, 128>;  // passed by value

enum Result : int {
  kSuccess,
  kUnhandledCudaError,
  kSystemError,
  kInternalError,
  kInvalidArgument,
  kInvalidUsage,
  kRemoteError,
  kInProgress,
};

enum DataType : int {
  kInt8,
  kUint8,
  kInt32,
  kUint32,
  kInt64,
  kUint64,
  kFloat16,
  kFloat32,
  kFloat64,
  kBfloat16,
};

enum RedOp : int { kSum, kProd, kMax, kMin, kAvg };

// ncclConfig_t of 2.14. By `size` and `version`, every later version accepts it and uses its own
// defaults for fields that were added since.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = INT_MIN;          // NCCL's own value
  int cga_cluster_size = INT_MIN;  // since 2.17, where the struct of 2.14 has padding
};

}  // namespace gradwire::cuda::nccl
