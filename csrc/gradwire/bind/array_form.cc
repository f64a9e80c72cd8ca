#include "gradwire/bind/array_form.h"

#include <pybind11/numpy.h>

#include <algorithm>

namespace gradwire::bind {
namespace {

// The parts of torch that are needed; all null before learn_torch().
struct Torch {
  PyTypeObject* tensor = nullptr;
  PyTypeObject* parameter = nullptr;
  PyObject* strided = nullptr;
  PyObject* increment_version = nullptr;

  bool has(const PyTypeObject* type) const noexcept { return type == tensor || type == parameter; }
};

// Keeps an object alive until the process ends.
PyObject* keep(py::object object) { return object.release().ptr(); }

Torch find_torch() {
  const auto module = py::module_::import("torch");
  Torch found;
  found.tensor = reinterpret_cast<PyTypeObject*>(keep(module.attr("Tensor")));
  found.parameter = reinterpret_cast<PyTypeObject*>(keep(module.attr("nn").attr("Parameter")));
  found.strided = keep(module.attr("strided"));
  found.increment_version = keep(module.attr("autograd").attr("graph").attr("increment_version"));
  return found;
}

Torch& torch() noexcept {
  static Torch found;
  return found;
}

class Name {
 public:
  explicit Name(const char* text) : text_(PyUnicode_InternFromString(text)) {}
  py::object of(PyObject* object) const {
    PyObject* value = PyObject_GetAttr(object, text_);
    if (value == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(value);
  }
  py::object call(PyObject* object) const {
    PyObject* value = PyObject_CallMethodNoArgs(object, text_);
    if (value == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(value);
  }

 private:
  PyObject* text_;
};

struct Names {
  Name is_cpu{"is_cpu"}, layout{"layout"}, dtype{"dtype"}, shape{"shape"};
  Name is_contiguous{"is_contiguous"}, is_neg{"is_neg"}, is_conj{"is_conj"};
  Name data_ptr{"data_ptr"}, element_size{"element_size"}, is_inference{"is_inference"};
};

const Names& names() {
  static const Names all;
  return all;
}

bool is_plain(PyObject* tensor) {
  const Names& name = names();
  return name.is_cpu.of(tensor).ptr() == Py_True &&
         name.layout.of(tensor).ptr() == torch().strided &&
         name.is_contiguous.call(tensor).ptr() == Py_True &&
         name.is_neg.call(tensor).ptr() == Py_False && name.is_conj.call(tensor).ptr() == Py_False;
}

}  // namespace

void learn_torch() {
  if (torch().tensor == nullptr) torch() = find_torch();
}

std::optional<ArrayForm> ArrayForm::of(PyObject* array) {
  const PyTypeObject* type = Py_TYPE(array);
  if (type == py::detail::npy_api::get().PyArray_Type_) return of_numpy(array);
  if (!torch().has(type)) return std::nullopt;
  try {
    return of_tensor(array);
  } catch (const py::error_already_set&) {  // a tensor without memory of its own
    return std::nullopt;
  }
}

std::optional<ArrayForm> ArrayForm::of_numpy(PyObject* array) {
  constexpr int kWanted = py::detail::npy_api::NPY_ARRAY_C_CONTIGUOUS_ |
                          py::detail::npy_api::NPY_ARRAY_ALIGNED_ |
                          py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
  const auto& fields = *py::detail::array_proxy(array);
  ArrayForm form;
  const std::span shape(fields.dimensions, static_cast<std::size_t>(fields.nd));
  if ((fields.flags & kWanted) != kWanted || !form.take_shape(shape)) return std::nullopt;
  form.type_ = Py_TYPE(array);
  form.dtype_ = py::reinterpret_borrow<py::object>(fields.descr);
  form.data_ = reinterpret_cast<std::byte*>(fields.data);
  return form;
}

std::optional<ArrayForm> ArrayForm::of_tensor(PyObject* tensor) {
  if (!is_plain(tensor)) return std::nullopt;
  const py::object sizes = names().shape.of(tensor);
  std::array<Py_ssize_t, kMostDimensions> shape{};
  const auto dimensions = static_cast<std::size_t>(PyTuple_GET_SIZE(sizes.ptr()));
  if (dimensions > shape.size()) return std::nullopt;
  for (std::size_t i = 0; i < dimensions; ++i)
    shape[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(sizes.ptr(), static_cast<Py_ssize_t>(i)));
  ArrayForm form;
  if (!form.take_shape(std::span(shape).first(dimensions))) return std::nullopt;
  form.type_ = Py_TYPE(tensor);
  form.dtype_ = names().dtype.of(tensor);
  form.data_ = static_cast<std::byte*>(PyLong_AsVoidPtr(names().data_ptr.call(tensor).ptr()));
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  if (form.data_ == nullptr && form.elements_ != 0) return std::nullopt;
  return form;
}

bool ArrayForm::take_shape(std::span<const Py_ssize_t> shape) noexcept {
  if (shape.size() > kMostDimensions) return false;
  dimensions_ = shape.size();
  std::ranges::copy(shape, shape_.begin());
  for (Py_ssize_t size : shape) elements_ *= static_cast<std::uint64_t>(size);
  return true;
}

bool ArrayForm::is_like(const ArrayForm& other) const noexcept {
  return type_ == other.type_ && dtype_.is(other.dtype_) && elements_ == other.elements_ &&
         dimensions_ == other.dimensions_ && shape_ == other.shape_;
}

void note_write(PyObject* array) {
  if (!torch().has(Py_TYPE(array))) return;
  if (names().is_inference.call(array).ptr() == Py_True) return;
  PyObject* done = PyObject_CallOneArg(torch().increment_version, array);
  if (done == nullptr) throw py::error_already_set();
  Py_DECREF(done);
}

}  // namespace gradwire::bind
