#include "gradwire/bind/shortcut.h"

#include <pybind11/numpy.h>

#include <limits>
#include <optional>
#include <utility>

#include "gradwire/bind/module.h"
#include "gradwire/bind/repeatable.h"

namespace gradwire::bind {
namespace {

// More forms than this are made anew each time, the oldest first.
constexpr std::size_t kMostKnown = 16;
// What takes no longer than to give up the interpreter's lock.
constexpr std::uint64_t kSmallBytes = 4096;

const py::detail::PyArray_Proxy& fields(PyObject* array) noexcept {
  return *py::detail::array_proxy(array);
}

std::uint64_t elements_of(const py::detail::PyArray_Proxy& array) noexcept {
  std::uint64_t count = 1;
  for (int i = 0; i < array.nd; ++i) count *= static_cast<std::uint64_t>(array.dimensions[i]);
  return count;
}

bool is_dense_and_writable(const py::detail::PyArray_Proxy& array) noexcept {
  constexpr int kWanted = py::detail::npy_api::NPY_ARRAY_C_CONTIGUOUS_ |
                          py::detail::npy_api::NPY_ARRAY_ALIGNED_ |
                          py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
  return (array.flags & kWanted) == kWanted;
}

}  // namespace

Shortcut::Shortcut(py::object communicator, py::object unfinished)
    : owner_(std::move(communicator)),
      unfinished_(std::move(unfinished)),
      communicator_(owner_.cast<Communicator&>()) {
  known_.reserve(kMostKnown);
}

void Shortcut::learn(const py::object& method, const py::object& array, const py::tuple& options,
                     const Request& request, double timeout) {
  const auto made = std::make_shared<Known>(Known{.request = request, .timeout = timeout});
  Known& known = *made;
  known.method = method;
  known.options = options;
  if (!array.is_none()) {
    const auto of = array.cast<py::array>();
    known.type = py::type::of(of);
    known.dtype = of.dtype();
    known.elements = static_cast<std::uint64_t>(of.size());
    known.small = static_cast<std::uint64_t>(of.nbytes()) <= kSmallBytes;
  }
  std::shared_ptr<const Known> replaced = made;  // to be destroyed without the mutex
  const std::lock_guard lock(mutex_);
  for (auto& each : known_)
    if (each->differs_in_numbers(known)) return each.swap(replaced);
  if (known_.size() < kMostKnown) return known_.push_back(made);
  known_[oldest_].swap(replaced);
  oldest_ = (oldest_ + 1) % kMostKnown;
}

bool Shortcut::Known::differs_in_numbers(const Known& other) const noexcept {
  if (!method.is(other.method) || !type.is(other.type) || !dtype.is(other.dtype) ||
      elements != other.elements)
    return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(options.ptr()); ++i) {
    PyObject* mine = PyTuple_GET_ITEM(options.ptr(), i);
    PyObject* its = PyTuple_GET_ITEM(other.options.ptr(), i);
    if (mine != its && !(PyFloat_Check(mine) && PyFloat_Check(its))) return false;
  }
  return true;
}

bool Shortcut::Known::is_like(PyObject* called, PyObject* array,
                              PyObject* const* given) const noexcept {
  if (called != method.ptr()) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(options.ptr()); ++i)
    if (given[i] != PyTuple_GET_ITEM(options.ptr(), i)) return false;
  if (array == nullptr || !type) return array == nullptr && !type;
  if (reinterpret_cast<PyObject*>(Py_TYPE(array)) != type.ptr()) return false;
  const auto& form = fields(array);
  return form.descr == dtype.ptr() && elements_of(form) == elements && is_dense_and_writable(form);
}

std::shared_ptr<const Shortcut::Known> Shortcut::find(PyObject* method, PyObject* array,
                                                      PyObject* const* options) const noexcept {
  const std::lock_guard lock(mutex_);
  for (const auto& each : known_)
    if (each->is_like(method, array, options)) return each;
  return nullptr;
}

bool Shortcut::call(PyObject* method, PyObject* array, PyObject* const* options) {
  if (PyObject_Size(unfinished_.ptr()) != 0) return false;
  const std::shared_ptr<const Known> known = find(method, array, options);
  if (known == nullptr) return false;
  run(*known, array == nullptr ? nullptr : reinterpret_cast<std::byte*>(fields(array).data));
  return true;
}

void Shortcut::run(const Known& known, std::byte* data) {
  const exec::Array array{data, known.elements};
  exec::Request request = known.request.view(known.timeout);
  if (known.type) request.inputs = request.outputs = {&array, 1};
  exec::Communicator& communicator = communicator_.get();
  if (!known.small) {
    const Unlocked unlocked;
    return communicator.run(request, check_signals);
  }
  std::optional<Unlocked> unlocked;
  const std::shared_ptr<exec::Work> work = communicator.begin(request, [&] { unlocked.emplace(); });
  if (work->done()) return work->rethrow();
  if (!unlocked) unlocked.emplace();
  communicator.wait(*work, std::numeric_limits<double>::infinity(), check_signals);
}

void bind_shortcut(py::module_& m) {
  py::class_<Shortcut, std::shared_ptr<Shortcut>>(m, "Shortcut")
      .def(py::init<py::object, py::object>(), py::arg("communicator"), py::arg("unfinished"))
      .def("learn", &Shortcut::learn, py::arg("method"), py::arg("array"), py::arg("options"),
           py::arg("request"), py::arg("timeout"))
      .def_property_readonly(
          "capsule", [](const std::shared_ptr<Shortcut>& self) { return as_capsule(self); });
  bind_repeatable(m);
}

}  // namespace gradwire::bind
