// Shortcut: the quick way for a blocking all_reduce of one NumPy array, or torch tensor on the CPU,
// that is like an earlier one, and for a barrier.
//
// Python checks a call and learns it here: its options, and the form of its array. A later call
// with the same options (the same objects, all immutable) and an array of the same form needs none
// of these checks again, and is made without them, by the Repeatable that stands before the method.
// What is small is begun with the interpreter's lock held: to give it up and take it back costs as
// much as to hear from a rank that is there already.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "gradwire/bind/array_form.h"
#include "gradwire/bind/communicator_handle.h"

namespace gradwire::bind {

class Shortcut {
 public:
  // Of the communicator, which it keeps. It is not taken while there is something in `unfinished`.
  Shortcut(py::object communicator, py::object unfinished);

  // `array`, or None where the method takes none, and `options` as call() will get them. The
  // request is of that array, in place.
  void learn(const py::object& method, const py::object& array, const py::tuple& options,
             const Request& request, double timeout);
  // A call of the method with an array, or null, and as many options as it has. False when it is
  // none that was learnt.
  bool call(PyObject* method, PyObject* array, PyObject* const* options);

 private:
  struct Known {
    Request request;  // whose array is that of the first call
    double timeout = 0;
    py::object method{};
    std::optional<ArrayForm> form{};  // none where there is no array
    py::tuple options{};
    bool small = true;

    // At most: a timeout that is computed anew for each call must not push out all others.
    bool differs_in_numbers(const Known& other) const noexcept;
    bool is_like(PyObject* method, const ArrayForm* form, PyObject* const* options) const noexcept;
    bool has_form(const ArrayForm* other) const noexcept;
  };
  bool call(PyObject* method, PyObject* array, const ArrayForm* form, PyObject* const* options);
  std::shared_ptr<const Known> find(PyObject* method, const ArrayForm* form,
                                    PyObject* const* options) const noexcept;
  void run(const Known& known, std::byte* data);

  py::object owner_, unfinished_;
  Communicator& communicator_;
  mutable std::mutex mutex_;  // there are interpreters without a lock of their own
  std::vector<std::shared_ptr<const Known>> known_;
  std::size_t oldest_ = 0;
};

}  // namespace gradwire::bind
