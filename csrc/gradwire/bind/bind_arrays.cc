// Reads DLPack capsules: they say where an array of any library lies, without that library and
// without NumPy, which has no bfloat16.
#include <cstdint>
#include <string>
#include <string_view>

#include "gradwire/base/dlpack.h"
#include "gradwire/base/error.h"
#include "gradwire/bind/module.h"

namespace gradwire::bind {
namespace {

py::dict as_dict(const DLPackArray& array) {
  py::tuple shape(array.shape.size());
  for (std::size_t i = 0; i < array.shape.size(); ++i) shape[i] = array.shape[i];
  return py::dict(py::arg("address") = array.address, py::arg("device_type") = array.device_type,
                  py::arg("device_id") = array.device_id, py::arg("code") = array.code,
                  py::arg("itemsize") = array.element_bytes, py::arg("shape") = shape,
                  py::arg("contiguous") = array.contiguous, py::arg("writable") = array.writable);
}

template <typename T>
const T& pointer_in(const py::capsule& capsule) {
  void* kept = PyCapsule_GetPointer(capsule.ptr(), capsule.name());
  if (kept == nullptr) throw py::error_already_set();
  return *static_cast<const T*>(kept);
}

// Reads a capsule. It still owns the array afterwards, so the caller must keep it alive.
py::dict read_capsule(const py::capsule& capsule) {
  const char* given = capsule.name();
  const std::string_view name = given == nullptr ? "" : given;
  if (name == "dltensor") return as_dict(read_dlpack(pointer_in<DLTensor>(capsule)));
  if (name != "dltensor_versioned")
    throw InvalidArgument("'" + std::string(name) + "' is no DLPack capsule, or a used one");
  return as_dict(read_dlpack(pointer_in<DLManagedTensorVersioned>(capsule)));
}

}  // namespace

void bind_arrays(py::module_& m) { m.def("read_dlpack", &read_capsule); }

}  // namespace gradwire::bind
