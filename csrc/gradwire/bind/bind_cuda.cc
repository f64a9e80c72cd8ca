#include <pybind11/stl.h>

#include "gradwire/bind/module.h"
#include "gradwire/cuda/cuda_info.h"
#include "gradwire/cuda/nccl/nccl.h"

namespace gradwire::bind {
namespace {

py::dict as_dict(const cuda::DeviceInfo& device) {
  return py::dict(py::arg("name") = device.name,
                  py::arg("capability") = py::make_tuple(device.major, device.minor),
                  py::arg("memory") = device.memory);
}

py::dict cuda_info(const std::string& library) {
  cuda::CudaInfo found;
  {
    const Unlocked unlocked;  // starting the driver takes a while
    found = cuda::find_cuda_info(library);
  }
  py::list devices;
  for (const cuda::DeviceInfo& each : found.devices) devices.append(as_dict(each));
  return py::dict(py::arg("library") = found.library,
                  py::arg("runtime") = cuda::cuda_version_text(found.runtime),
                  py::arg("driver") = cuda::cuda_version_text(found.driver),
                  py::arg("devices") = devices, py::arg("why_not") = found.why_not);
}

py::dict nccl_info(const std::vector<std::string>& search) {
  const cuda::Nccl& nccl = cuda::Nccl::load(search);
  return py::dict(py::arg("version") = cuda::version_text(nccl.version),
                  py::arg("library") = nccl.library, py::arg("origin") = nccl.origin);
}

}  // namespace

void bind_cuda(py::module_& m) {
  m.def("cuda_info", &cuda_info, py::arg("library") = "");
  m.def("nccl_info", &nccl_info);
}

}  // namespace gradwire::bind
