#include "gradwire/bind/shortcut.h"

#include <exception>
#include <limits>
#include <utility>

#include "gradwire/bind/module.h"

namespace gradwire::bind {
namespace {

// More forms than this are made anew each time, the oldest first.
constexpr std::size_t kMostKnown = 16;
// What takes no longer than to give up the interpreter's lock.
constexpr std::uint64_t kSmallBytes = 4096;
constexpr const char* kCapsule = "gradwire.Shortcut";

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

// As a call from Python raises it.
void set_error(const std::exception_ptr& error) noexcept {
  try {
    py::cpp_function([error] { std::rethrow_exception(error); })();
  } catch (py::error_already_set& raised) {
    raised.restore();
  }
}

PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t count) noexcept {
  return (*static_cast<std::shared_ptr<Shortcut>*>(PyCapsule_GetPointer(self, kCapsule)))
      ->call(args, count);
}

// A builtin, which Python calls without packing its arguments; it keeps the shortcut.
py::object as_builtin(const std::shared_ptr<Shortcut>& shortcut) {
  static PyMethodDef method = {"call",
                               reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call)),
                               METH_FASTCALL, nullptr};
  auto* kept = new std::shared_ptr<Shortcut>(shortcut);
  const py::capsule self(kept, kCapsule, [](PyObject* capsule) {
    delete static_cast<std::shared_ptr<Shortcut>*>(PyCapsule_GetPointer(capsule, kCapsule));
  });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&method, self.ptr()));
}

}  // namespace

Shortcut::Shortcut(py::object communicator)
    : owner_(std::move(communicator)), communicator_(owner_.cast<Communicator&>()) {
  known_.reserve(kMostKnown);
}

void Shortcut::learn(const py::array& array, const py::tuple& options, const Request& request,
                     double timeout) {
  const auto made = std::make_shared<Known>(Known{.request = request, .timeout = timeout});
  Known& known = *made;
  known.type = py::type::of(array);
  known.dtype = array.dtype();
  known.options = options;
  known.elements = static_cast<std::uint64_t>(array.size());
  known.small = static_cast<std::uint64_t>(array.nbytes()) <= kSmallBytes;
  std::shared_ptr<const Known> replaced = made;  // to be destroyed without the mutex
  const std::lock_guard lock(mutex_);
  if (known_.size() < kMostKnown) return known_.push_back(made);
  known_[oldest_].swap(replaced);
  oldest_ = (oldest_ + 1) % kMostKnown;
}

std::shared_ptr<const Shortcut::Known> Shortcut::find(PyObject* const* args,
                                                      Py_ssize_t count) const noexcept {
  const auto alike = [&](const Known& known) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(args[0])) != known.type.ptr()) return false;
    const auto& array = fields(args[0]);
    if (array.descr != known.dtype.ptr() || elements_of(array) != known.elements) return false;
    if (count != PyTuple_GET_SIZE(known.options.ptr()) + 1) return false;
    for (Py_ssize_t i = 1; i < count; ++i)
      if (args[i] != PyTuple_GET_ITEM(known.options.ptr(), i - 1)) return false;
    return is_dense_and_writable(array);
  };
  const std::lock_guard lock(mutex_);
  for (const auto& each : known_)
    if (alike(*each)) return each;
  return nullptr;
}

PyObject* Shortcut::call(PyObject* const* args, Py_ssize_t count) noexcept {
  const std::shared_ptr<const Known> known = find(args, count);
  if (known == nullptr) Py_RETURN_FALSE;
  try {
    run(*known, reinterpret_cast<std::byte*>(fields(args[0]).data));
  } catch (...) {
    set_error(std::current_exception());
    return nullptr;
  }
  Py_RETURN_TRUE;
}

void Shortcut::run(const Known& known, std::byte* data) {
  const exec::Array array{data, known.elements};
  exec::Request request = known.request.view(known.timeout);
  request.inputs = request.outputs = {&array, 1};
  exec::Communicator& communicator = communicator_.get();
  if (!known.small) {
    const Unlocked unlocked;
    return communicator.run(request, check_signals);
  }
  const std::shared_ptr<exec::Work> work = communicator.begin(request);
  if (!work->done()) {
    const Unlocked unlocked;
    communicator.wait(*work, std::numeric_limits<double>::infinity(), check_signals);
  }
  work->rethrow();
}

void bind_shortcut(py::module_& m) {
  py::class_<Shortcut, std::shared_ptr<Shortcut>>(m, "Shortcut")
      .def(py::init<py::object>(), py::arg("communicator"))
      .def("learn", &Shortcut::learn, py::arg("array"), py::arg("options"), py::arg("request"),
           py::arg("timeout"))
      .def_property_readonly("call", &as_builtin);
}

}  // namespace gradwire::bind
