// Reads DLPack capsules: where an array of any library lies, without its library and without NumPy,
// which has no bfloat16.
#include <cstdint>
#include <string_view>

#include "gradwire/base/error.h"
#include "gradwire/bind/module.h"

namespace gradwire::bind {
namespace {

// The C structs of DLPack 1.0 (https://dmlc.github.io/dlpack/latest/c_api.html).
struct DLTensor {
  void* data;
  std::int32_t device_type;
  std::int32_t device_id;
  std::int32_t ndim;
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
  const std::int64_t* shape;
  const std::int64_t* strides;
  std::uint64_t byte_offset;
};

struct DLManagedTensorVersioned {
  std::uint32_t major, minor;
  void* manager;
  void (*deleter)(DLManagedTensorVersioned*);
  std::uint64_t flags;
  DLTensor tensor;
};

constexpr std::uint64_t kReadOnly = 1;

bool row_major(const DLTensor& tensor) {
  if (tensor.strides == nullptr) return true;
  bool dense = true;
  std::int64_t step = 1;
  for (std::int32_t i = tensor.ndim - 1; i >= 0; --i) {
    if (tensor.shape[i] == 0) return true;
    dense = dense && (tensor.shape[i] == 1 || tensor.strides[i] == step);
    step *= tensor.shape[i];
  }
  return dense;
}

py::dict describe(const DLTensor& tensor, bool read_only) {
  py::tuple shape(static_cast<std::size_t>(tensor.ndim));
  for (std::int32_t i = 0; i < tensor.ndim; ++i)
    shape[static_cast<std::size_t>(i)] = tensor.shape[i];
  py::dict out;
  out["address"] = reinterpret_cast<std::uintptr_t>(tensor.data) + tensor.byte_offset;
  out["device_type"] = tensor.device_type;
  out["code"] = tensor.code;
  out["bits"] = tensor.bits * tensor.lanes;
  out["shape"] = shape;
  out["contiguous"] = row_major(tensor);
  out["read_only"] = read_only;
  return out;
}

template <typename T>
const T& pointer_in(const py::capsule& capsule) {
  return *static_cast<const T*>(PyCapsule_GetPointer(capsule.ptr(), capsule.name()));
}

// The capsule still owns the array and is to be kept alive by the caller.
py::dict read_dlpack(const py::capsule& capsule) {
  const char* given = capsule.name();
  const std::string_view name = given == nullptr ? "" : given;
  if (name == "dltensor") return describe(pointer_in<DLTensor>(capsule), false);
  if (name != "dltensor_versioned")
    throw InvalidArgument("'" + std::string(name) + "' is no DLPack capsule, or a used one");
  const auto& managed = pointer_in<DLManagedTensorVersioned>(capsule);
  if (managed.major != 1)
    throw InvalidArgument("DLPack " + std::to_string(managed.major) + " is not known, 1 is");
  return describe(managed.tensor, (managed.flags & kReadOnly) != 0);
}

}  // namespace

void bind_arrays(py::module_& m) { m.def("read_dlpack", &read_dlpack, py::arg("capsule")); }

}  // namespace gradwire::bind
