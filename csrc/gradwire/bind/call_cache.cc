#include "gradwire/bind/call_cache.h"

#include <pybind11/numpy.h>

#include <limits>
#include <optional>
#include <utility>

#include "gradwire/bind/fast_path_method.h"
#include "gradwire/bind/module.h"

namespace gradwire::bind {
namespace {

// How many calls are cached; a further one replaces the oldest.
constexpr std::size_t kMostCalls = 16;
// A call of at most so many bytes takes no longer than giving up the GIL.
constexpr std::uint64_t kSmallBytes = 4096;

}  // namespace

CallCache::CallCache(py::object communicator, py::object unfinished)
    : owner_(std::move(communicator)),
      unfinished_(std::move(unfinished)),
      communicator_(owner_.cast<CommunicatorHandle&>()) {
  calls_.reserve(kMostCalls);
}

void CallCache::add(const py::object& method, const py::object& array, const py::tuple& options,
                    const OwnedRequest& request, double timeout) {
  const auto made =
      std::make_shared<CachedCall>(CachedCall{.request = request, .timeout = timeout});
  CachedCall& cached = *made;
  cached.method = method;
  cached.options = options;
  if (!array.is_none()) {
    if (!py::isinstance<py::array>(array)) learn_torch();
    cached.form = ArrayForm::of(array.ptr());
    if (!cached.form) return;
    cached.small = cached.form->elements() * size_of(request.view(0).dtype) <= kSmallBytes;
  }
  std::shared_ptr<const CachedCall> replaced = made;  // to be destroyed after the mutex is released
  const std::lock_guard lock(mutex_);
  for (auto& each : calls_)
    if (each->differs_in_numbers(cached)) return each.swap(replaced);
  if (calls_.size() < kMostCalls) return calls_.push_back(made);
  calls_[oldest_].swap(replaced);
  oldest_ = (oldest_ + 1) % kMostCalls;
}

bool CallCache::CachedCall::differs_in_numbers(const CachedCall& other) const noexcept {
  if (!method.is(other.method) || !has_form(other.form ? &*other.form : nullptr)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(options.ptr()); ++i) {
    PyObject* mine = PyTuple_GET_ITEM(options.ptr(), i);
    PyObject* its = PyTuple_GET_ITEM(other.options.ptr(), i);
    if (mine != its && !(PyFloat_Check(mine) && PyFloat_Check(its))) return false;
  }
  return true;
}

bool CallCache::CachedCall::has_form(const ArrayForm* other) const noexcept {
  return form && other != nullptr ? form->is_like(*other) : !form && other == nullptr;
}

bool CallCache::CachedCall::is_like(PyObject* called, const ArrayForm* given_form,
                                    PyObject* const* given) const noexcept {
  if (called != method.ptr()) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(options.ptr()); ++i)
    if (given[i] != PyTuple_GET_ITEM(options.ptr(), i)) return false;
  return has_form(given_form);
}

std::shared_ptr<const CallCache::CachedCall> CallCache::find(
    PyObject* method, const ArrayForm* form, PyObject* const* options) const noexcept {
  const std::lock_guard lock(mutex_);
  for (const auto& each : calls_)
    if (each->is_like(method, form, options)) return each;
  return nullptr;
}

// Makes the call. Reads the array without the mutex: its library may run any Python code.
bool CallCache::call(PyObject* method, PyObject* array, PyObject* const* options) {
  if (PyObject_Size(unfinished_.ptr()) != 0) return false;
  if (array == nullptr) return call(method, array, nullptr, options);
  const std::optional<ArrayForm> form = ArrayForm::of(array);
  return form && call(method, array, &*form, options);
}

bool CallCache::call(PyObject* method, PyObject* array, const ArrayForm* form,
                     PyObject* const* options) {
  const std::shared_ptr<const CachedCall> cached = find(method, form, options);
  if (cached == nullptr) return false;
  if (form != nullptr) note_write(array);
  run(*cached, form == nullptr ? nullptr : form->data());
  return true;
}

void CallCache::run(const CachedCall& cached, std::byte* data) {
  const exec::Array array{data, cached.form ? cached.form->elements() : 0};
  exec::Request request = cached.request.view(cached.timeout);
  if (cached.form) request.inputs = request.outputs = {&array, 1};
  exec::Communicator& communicator = communicator_.get();
  if (!cached.small) {
    const Unlocked unlocked;
    return communicator.run(request, check_signals);
  }
  std::optional<Unlocked> unlocked;
  const std::shared_ptr<Work> work = communicator.begin(request, [&] { unlocked.emplace(); });
  if (work->done()) return work->rethrow();
  if (!unlocked) unlocked.emplace();
  communicator.wait(*work, std::numeric_limits<double>::infinity(), check_signals);
}

void bind_call_cache(py::module_& m) {
  py::class_<CallCache, std::shared_ptr<CallCache>>(m, "CallCache")
      .def(py::init<py::object, py::object>())
      .def("add", &CallCache::add)
      .def_property_readonly(
          "capsule", [](const std::shared_ptr<CallCache>& self) { return as_capsule(self); });
  bind_fast_path_method(m);
}

}  // namespace gradwire::bind
