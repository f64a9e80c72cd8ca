// Shortcut: the quick way for a blocking all_reduce of one NumPy array that is like an earlier one.
//
// Python checks a call and learns it here: its options, and the form of its array. A later call
// with the same options (the same objects, all immutable) and an array of the same form needs none
// of these checks again, and is made without them. What is small is begun with the interpreter's
// lock held: to give it up and take it back costs as much as to hear from a rank that is there
// already.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "gradwire/bind/communicator.h"

namespace gradwire::bind {

class Shortcut {
 public:
  // Of the communicator, which it keeps.
  explicit Shortcut(py::object communicator);

  // `array` and `options` as call() will get them. The request is of that array, in place.
  void learn(const py::array& array, const py::tuple& options, const Request& request,
             double timeout);
  // args: the array, then each of the options. A new reference to True when the call was made, to
  // False when it is none that was learnt; null with a Python error set when it failed.
  PyObject* call(PyObject* const* args, Py_ssize_t count) noexcept;

 private:
  struct Known {
    Request request;  // whose array is that of the first call
    double timeout = 0;
    py::object type{}, dtype{};
    py::tuple options{};
    std::uint64_t elements = 0;
    bool small = false;
  };
  std::shared_ptr<const Known> find(PyObject* const* args, Py_ssize_t count) const noexcept;
  void run(const Known& known, std::byte* data);

  py::object owner_;
  Communicator& communicator_;
  mutable std::mutex mutex_;  // there are interpreters without a lock of their own
  std::vector<std::shared_ptr<const Known>> known_;
  std::size_t oldest_ = 0;
};

}  // namespace gradwire::bind
