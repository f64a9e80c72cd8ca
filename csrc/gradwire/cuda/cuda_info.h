// CudaInfo: the GPUs of this machine, or why there are none, for people to read.
#pragma once

#include <string>
#include <vector>

#include "gradwire/cuda/api.h"

namespace gradwire::cuda {

struct CudaInfo {
  std::string library;          // path of gradwire's CUDA part, found or not
  int runtime = 0, driver = 0;  // 13000 is 13.0; 0: unknown
  std::vector<DeviceInfo> devices;
  std::string why_not;  // empty where there are devices
};

// Uses load_api(library). Throws nothing that a machine can cause. Initialises the driver.
CudaInfo find_cuda_info(const std::string& library = "");
CudaInfo find_cuda_info(const Api& api);

// Returns the text of a version: "13.0".
std::string cuda_version_text(int version);

}  // namespace gradwire::cuda
