// Repeatable: what stands before a method of gradwire.Communicator and tries its shortcut first. It
// is called, bound and overridden as the method is, and has its signature.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "gradwire/bind/shortcut.h"

namespace gradwire::bind {

// The form in which an instance has its shortcut, as its attribute `_shortcut`.
py::capsule as_capsule(const std::shared_ptr<Shortcut>& shortcut);

void bind_repeatable(py::module_& m);

}  // namespace gradwire::bind
