#include "gradwire/cuda/cuda_info.h"

#include "gradwire/cuda/device.h"

namespace gradwire::cuda {
namespace {

std::string refusal(const Api& api, Status status, const CudaInfo& found) {
  const std::string driver = cuda_version_text(found.driver);
  switch (status) {
    case kNoDriver:
      return found.driver == 0
                 ? "there is no NVIDIA driver"
                 : "the driver is for CUDA " + driver + ", and " +
                       cuda_version_text(found.runtime) + " is needed: install a newer driver";
    case kNoDevice:
      return "the driver, for CUDA " + driver +
             ", finds no GPU: see nvidia-smi and "
             "CUDA_VISIBLE_DEVICES";
    default:
      return std::string(api.describe(status)) + " (" + std::to_string(status) + ")";
  }
}

Status find_devices(const Api& api, std::vector<DeviceInfo>& found) {
  int count = 0;
  Status status = api.device_count(&count);
  for (int i = 0; status == 0 && i < count; ++i) status = api.device_info(i, &found.emplace_back());
  return status == 0 && count == 0 ? kNoDevice : status;
}

}  // namespace

CudaInfo find_cuda_info(const Api& api) {
  CudaInfo found;
  api.versions(&found.runtime, &found.driver);
  const Status status = find_devices(api, found.devices);
  if (status == 0) return found;
  found.devices.clear();
  found.why_not = refusal(api, status, found);
  return found;
}

CudaInfo find_cuda_info(const std::string& library) {
  CudaInfo found;
  try {
    found = find_cuda_info(load_api(library));
  } catch (const InvalidArgument& error) {
    found.why_not = error.what();
  }
  found.library = library.empty() ? api_path() : library;
  return found;
}

std::string cuda_version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace gradwire::cuda
