#include <pybind11/stl.h>

#include <array>

#include "gradwire/bind/module.h"
#include "gradwire/transport/transport.h"

namespace gradwire::bind {

using transport::TransportContext;
using transport::TransportKind;

namespace {

std::string_view reach_of(const TransportKind& kind) {
  using transport::Reach;
  return kind.reach == Reach::kProcess   ? "process"
         : kind.reach == Reach::kHost    ? "host"
         : kind.reach == Reach::kNetwork ? "network"
                                         : "all";
}

// Returns the fields of Python's TransportKind, in its order.
py::tuple fields_of(const TransportKind& kind) {
  std::vector<std::array<std::string_view, 3>> settings;
  for (const transport::EnvironmentVariable& each : kind.settings)
    settings.push_back({each.name, each.meaning, each.unset});
  return py::make_tuple(kind.name, reach_of(kind), kind.sockets == transport::Sockets::kUnix,
                        kind.by_default, settings);
}

std::vector<py::tuple> kinds() {
  std::vector<py::tuple> all;
  for (const TransportKind* kind : transport::transport_kinds()) all.push_back(fields_of(*kind));
  return all;
}

auto open(const std::string& name, const transport::Settings& settings) {
  transport::OpenedTransport opened = transport::open_transport(name, settings);
  return std::pair(std::move(opened.context), std::move(opened.why_not));
}

}  // namespace

void bind_transport(py::module_& m) {
  py::class_<TransportContext, std::shared_ptr<TransportContext>>(m, "TransportContext")
      .def("describe", &TransportContext::describe)
      .def("networks", &TransportContext::networks);
  m.def("transport_kinds", &kinds);
  m.def("open_transport", &open);
}

}  // namespace gradwire::bind
