// The parts of the extension module gradwire._core; python/gradwire/_core.pyi says what is in them.
#pragma once

#include <pybind11/pybind11.h>

namespace gradwire::bind {

namespace py = pybind11;

void bind_errors(py::module_& m);
void bind_arrays(py::module_& m);
void bind_codec(py::module_& m);
void bind_schedule(py::module_& m);
void bind_communicator(py::module_& m);

}  // namespace gradwire::bind
