// CudaInfo: the GPUs of this machine, or why there are none, for people to read.
#pragma once

#include <string>
#include <vector>

#include "gradwire/cuda/api.h"

namespace gradwire::cuda {

struct CudaInfo {
  std::string library;          // gradwire's CUDA part, as it was looked for
  int runtime = 0, driver = 0;  // 13000 is 13.0; 0: not known
  std::vector<DeviceInfo> devices;
  std::string why_not;  // empty where there are devices
};

// Uses load_api(library). Throws nothing that a machine can cause; starts the driver.
CudaInfo find_cuda_info(const std::string& library = "");
CudaInfo find_cuda_info(const Api& api);

// "13.0".
std::string cuda_version_text(int version);

}  // namespace gradwire::cuda
