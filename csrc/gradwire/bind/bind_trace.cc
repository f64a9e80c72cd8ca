#include <pybind11/stl.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "gradwire/bind/module.h"
#include "gradwire/exec/trace/recorder.h"

namespace gradwire::bind {
namespace {

using Read =
    std::tuple<py::bytes, std::uint64_t, std::map<std::uint64_t, std::string>, std::uint64_t>;

// Returns the events as they lie in memory, how many were dropped before them, the texts of their
// labels, and how many texts had no room.
Read read(const exec::Recorder& recorder) {
  exec::Recorder::Events found;
  {
    const py::gil_scoped_release unlocked;
    found = recorder.read();
  }
  const auto* data = reinterpret_cast<const char*>(found.events.data());
  return {py::bytes(data, found.events.size() * sizeof(exec::Event)), found.dropped,
          std::move(found.labels), found.unlabelled};
}

}  // namespace

void bind_trace(py::module_& m) {
  py::class_<exec::Recorder, std::shared_ptr<exec::Recorder>>(m, "Recorder")
      .def(py::init<std::size_t, std::int64_t>(), py::arg("events"), py::arg("skew") = 0)
      .def("read", &read);
}

}  // namespace gradwire::bind
