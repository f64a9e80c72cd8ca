#include <pybind11/stl.h>

#include "gradwire/bind/module.h"
#include "gradwire/cuda/facts.h"
#include "gradwire/cuda/nccl.h"

namespace gradwire::bind {
namespace {

py::dict as_dict(const cuda::DeviceFacts& device) {
  py::dict out;
  out["name"] = device.name;
  out["capability"] = py::make_tuple(device.major, device.minor);
  out["memory"] = device.memory;
  return out;
}

py::dict cuda_facts(const std::string& library) {
  cuda::Facts found;
  {
    const Unlocked unlocked;  // to start the driver takes a while
    found = cuda::find_facts(library);
  }
  py::list devices;
  for (const cuda::DeviceFacts& each : found.devices) devices.append(as_dict(each));
  py::dict out;
  out["library"] = found.library;
  out["runtime"] = cuda::cuda_version_text(found.runtime);
  out["driver"] = cuda::cuda_version_text(found.driver);
  out["devices"] = devices;
  out["why_not"] = found.why_not;
  return out;
}

py::dict nccl_facts(const std::vector<std::string>& search) {
  const cuda::Nccl& nccl = cuda::Nccl::load(search);
  py::dict out;
  out["version"] = cuda::version_text(nccl.version);
  out["library"] = nccl.library;
  out["origin"] = nccl.origin;
  return out;
}

}  // namespace

void bind_cuda(py::module_& m) {
  m.def("cuda_facts", &cuda_facts, py::arg("library") = "");
  m.def("nccl_facts", &nccl_facts, py::arg("search"));
}

}  // namespace gradwire::bind
