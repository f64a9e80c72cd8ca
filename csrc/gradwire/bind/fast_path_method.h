// FastPathMethod: wraps a method of gradwire.CommunicatorHandle and tries the instance's CallCache
// first. It is called, bound and overridden as the method is, and has its signature.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "gradwire/bind/call_cache.h"

namespace gradwire::bind {

// The capsule that an instance holds as its attribute `_call_cache`.
py::capsule as_capsule(const std::shared_ptr<CallCache>& cache);

void bind_fast_path_method(py::module_& m);

}  // namespace gradwire::bind
