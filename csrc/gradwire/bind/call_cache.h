// CallCache: lets repeated calls skip Python's checks: blocking all_reduces of one NumPy array or
// one torch tensor on the CPU, and barriers.
//
// Python checks a call and adds it here, with its options and the form of its array. A later call
// with the same options (the same objects, all immutable) and an array of the same form would pass
// the same checks, so the FastPathMethod that wraps the method makes it without them. A small call
// keeps the GIL at first: giving it up and taking it back costs as much as a message from a rank
// that has arrived already.
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

class CallCache {
 public:
  // Keeps the communicator alive. The cache is not used while `unfinished` is not empty.
  CallCache(py::object communicator, py::object unfinished);

  // Adds a call. `array` is None if the method takes none, and `options` are as call() will get
  // them. The request must be for that array, in place.
  void add(const py::object& method, const py::object& array, const py::tuple& options,
           const OwnedRequest& request, double timeout);
  // Makes a call of the method with an array, or null, and as many options as the method has.
  // Returns false if no call like it was added.
  bool call(PyObject* method, PyObject* array, PyObject* const* options);

 private:
  struct CachedCall {
    OwnedRequest request;  // with the first call's array
    double timeout = 0;
    py::object method{};
    std::optional<ArrayForm> form{};  // none where there is no array
    py::tuple options{};
    bool small = true;

    // Returns whether the two calls differ at most in numbers: a timeout that is computed anew for
    // each call must not push out all other calls.
    bool differs_in_numbers(const CachedCall& other) const noexcept;
    bool is_like(PyObject* method, const ArrayForm* form, PyObject* const* options) const noexcept;
    bool has_form(const ArrayForm* other) const noexcept;
  };
  bool call(PyObject* method, PyObject* array, const ArrayForm* form, PyObject* const* options);
  std::shared_ptr<const CachedCall> find(PyObject* method, const ArrayForm* form,
                                         PyObject* const* options) const noexcept;
  void run(const CachedCall& cached, std::byte* data);

  py::object owner_, unfinished_;
  CommunicatorHandle& communicator_;
  mutable std::mutex mutex_;  // there are interpreters without a lock of their own
  std::vector<std::shared_ptr<const CachedCall>> calls_;
  std::size_t oldest_ = 0;
};

}  // namespace gradwire::bind
