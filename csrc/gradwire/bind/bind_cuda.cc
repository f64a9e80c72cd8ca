#include <pybind11/stl.h>

#include "gradwire/bind/module.h"
#include "gradwire/cuda/cuda_info.h"
#include "gradwire/cuda/nccl/nccl.h"

namespace gradwire::bind {
namespace {

py::dict as_dict(const cuda::DeviceInfo& device) {
  py::dict out;
  out["name"] = device.name;
  out["capability"] = py::make_tuple(device.major, device.minor);
  out["memory"] = device.memory;
  return out;
}

py::dict cuda_info(const std::string& library) {
  cuda::CudaInfo found;
  {
    const Unlocked unlocked;  // starting the driver takes a while
    found = cuda::find_cuda_info(library);
  }
  py::list devices;
  for (const cuda::DeviceInfo& each : found.devices) devices.append(as_dict(each));
  py::dict out;
  out["library"] = found.library;
  out["runtime"] = cuda::cuda_version_text(found.runtime);
  out["driver"] = cuda::cuda_version_text(found.driver);
  out["devices"] = devices;
  out["why_not"] = found.why_not;
  return out;
}

py::dict nccl_info(const std::vector<std::string>& search) {
  const cuda::Nccl& nccl = cuda::Nccl::load(search);
  py::dict out;
  out["version"] = cuda::version_text(nccl.version);
  out["library"] = nccl.library;
  out["origin"] = nccl.origin;
  return out;
}

}  // namespace

void bind_cuda(py::module_& m) {
  m.def("cuda_info", &cuda_info, py::arg("library") = "");
  m.def("nccl_info", &nccl_info, py::arg("search"));
}

}  // namespace gradwire::bind
