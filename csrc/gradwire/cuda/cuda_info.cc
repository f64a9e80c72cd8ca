#include "gradwire/cuda/cuda_info.h"

#include "gradwire/cuda/device.h"

namespace gradwire::cuda {
namespace {

// Returns the oldest driver that a runtime works with; empty where that is not known. (CUDA release
// notes, minor version compatibility)
std::string_view oldest_driver(int runtime) {
  switch (runtime / 1000) {
    case 12:
      return "525";
    case 13:
      return "580";
    default:
      return "";
  }
}

std::string why_no_driver(const CudaInfo& found) {
  const std::string_view oldest = oldest_driver(found.runtime);
  const std::string which =
      oldest.empty() ? "a newer driver" : "driver " + std::string(oldest) + " or newer";
  if (found.driver == 0)
    return "there is no NVIDIA driver" + (oldest.empty() ? "" : ": install " + which);
  return "the driver is for CUDA " + cuda_version_text(found.driver) + ", and " +
         cuda_version_text(found.runtime) + " is needed: install " + which +
         ", or build gradwire with an older nvcc";
}

std::string refusal(const Api& api, Status status, const CudaInfo& found) {
  const std::string driver = cuda_version_text(found.driver);
  switch (status) {
    case kNoDriver:
      return why_no_driver(found);
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
