#include <pybind11/stl.h>

#include <array>

#include "gradwire/bind/module.h"
#include "gradwire/transport/transport.h"
#include "gradwire/transport/ways/ways.h"

namespace gradwire::bind {

using transport::TransportContext;
using transport::TransportKind;
using transport::Ways;

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

// Takes over the descriptors, even if a later line throws.
void renew(Ways& self, int way, std::uint32_t generation,
           const std::vector<std::tuple<int, std::shared_ptr<crypto::Seal>, int>>& sockets) {
  std::vector<transport::Connection> all;
  for (const auto& [fd, seal, part] : sockets) all.emplace_back(UniqueFd(fd), seal).part = part;
  self.renew(way, generation, std::move(all));
}

}  // namespace

void bind_transport(py::module_& m) {
  py::class_<Ways, std::shared_ptr<Ways>>(m, "Ways")
      .def(py::init<int>())
      .def("next",
           [](Ways& self) -> std::optional<std::tuple<int, bool, std::string>> {
             const auto news = self.next();
             if (!news) return std::nullopt;
             return std::tuple(news->way, news->works, news->why);
           })
      .def("ended", &Ways::ended)
      .def("generation", &Ways::generation)
      .def("renew", &renew)
      // Two are the object's own pointer and the argument.
      .def_property_readonly("in_use", [](const std::shared_ptr<Ways>& self) {
        return self.use_count() > 2 && !self->finished();
      });
  py::class_<TransportContext, std::shared_ptr<TransportContext>>(m, "TransportContext")
      .def("describe", &TransportContext::describe)
      .def("networks", &TransportContext::networks);
  m.def("transport_kinds", &kinds);
  m.def("open_transport", &open);
}

}  // namespace gradwire::bind
