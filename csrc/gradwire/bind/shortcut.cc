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
    if (!py::isinstance<py::array>(array)) learn_torch();
    known.form = ArrayForm::of(array.ptr());
    if (!known.form) return;
    known.small = known.form->elements() * size_of(request.view(0).dtype) <= kSmallBytes;
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
  if (!method.is(other.method) || !has_form(other.form ? &*other.form : nullptr)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(options.ptr()); ++i) {
    PyObject* mine = PyTuple_GET_ITEM(options.ptr(), i);
    PyObject* its = PyTuple_GET_ITEM(other.options.ptr(), i);
    if (mine != its && !(PyFloat_Check(mine) && PyFloat_Check(its))) return false;
  }
  return true;
}

bool Shortcut::Known::has_form(const ArrayForm* other) const noexcept {
  return form && other != nullptr ? form->is_like(*other) : !form && other == nullptr;
}

bool Shortcut::Known::is_like(PyObject* called, const ArrayForm* given_form,
                              PyObject* const* given) const noexcept {
  if (called != method.ptr()) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(options.ptr()); ++i)
    if (given[i] != PyTuple_GET_ITEM(options.ptr(), i)) return false;
  return has_form(given_form);
}

std::shared_ptr<const Shortcut::Known> Shortcut::find(PyObject* method, const ArrayForm* form,
                                                      PyObject* const* options) const noexcept {
  const std::lock_guard lock(mutex_);
  for (const auto& each : known_)
    if (each->is_like(method, form, options)) return each;
  return nullptr;
}

// The array is looked at without the mutex: its library may run any Python code.
bool Shortcut::call(PyObject* method, PyObject* array, PyObject* const* options) {
  if (PyObject_Size(unfinished_.ptr()) != 0) return false;
  if (array == nullptr) return call(method, array, nullptr, options);
  const std::optional<ArrayForm> form = ArrayForm::of(array);
  return form && call(method, array, &*form, options);
}

bool Shortcut::call(PyObject* method, PyObject* array, const ArrayForm* form,
                    PyObject* const* options) {
  const std::shared_ptr<const Known> known = find(method, form, options);
  if (known == nullptr) return false;
  if (form != nullptr) note_write(array);
  run(*known, form == nullptr ? nullptr : form->data());
  return true;
}

void Shortcut::run(const Known& known, std::byte* data) {
  const exec::Array array{data, known.form ? known.form->elements() : 0};
  exec::Request request = known.request.view(known.timeout);
  if (known.form) request.inputs = request.outputs = {&array, 1};
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
