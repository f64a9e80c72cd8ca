#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gradwire/base/error.h"
#include "gradwire/bind/module.h"
#include "gradwire/schedule/generators.h"
#include "gradwire/schedule/schedule.h"
#include "gradwire/schedule/verify.h"

namespace gradwire::bind {
namespace {

using schedule::Edge;
using schedule::Report;
using schedule::Schedule;
using Groups = std::vector<std::vector<Rank>>;
// round, src, dst, first chunk, last chunk + 1, reduces
using EdgeTuple = std::tuple<int, Rank, Rank, int, int, bool>;

Schedule generate(const std::string& collective, const std::string& algorithm, int ranks, Rank root,
                  const Groups& groups) {
  return schedule::generate({parse_collective(collective), algorithm, ranks, root, groups});
}

Schedule from_edges(const std::string& collective, std::string name, int ranks, int chunks,
                    Rank root, const std::vector<EdgeTuple>& edges) {
  schedule::Builder builder(ranks, chunks);
  for (const auto& [round, src, dst, first, last, reduces] : edges)
    reduces ? builder.reduce(round, src, dst, {first, last})
            : builder.copy(round, src, dst, {first, last});
  return std::move(builder).build(parse_collective(collective), std::move(name), root);
}

std::optional<std::pair<int, double>> closed_form(const Schedule& self, const Groups& groups) {
  const auto shape =
      schedule::closed_form({self.collective, self.name, self.ranks, self.root, groups});
  if (!shape) return std::nullopt;
  return std::pair(shape->rounds, shape->max_sent);
}

std::vector<std::string_view> algorithms(const std::string& collective) {
  return schedule::algorithms(parse_collective(collective));
}

void bind_edge(py::module_& m) {
  py::class_<Edge>(m, "Edge")
      .def_readonly("src", &Edge::src)
      .def_readonly("dst", &Edge::dst)
      .def_property_readonly("first", [](const Edge& self) { return self.chunks.first; })
      .def_property_readonly("last", [](const Edge& self) { return self.chunks.last; })
      .def_property_readonly(
          "reduces", [](const Edge& self) { return self.landing == schedule::Landing::kReduce; });
}

void bind_report(py::module_& m) {
  py::class_<Report>(m, "Report")
      .def_readonly("correct", &Report::correct)
      .def_readonly("complete", &Report::complete)
      .def_readonly("deadlock_free", &Report::deadlock_free)
      .def_readonly("agreement", &Report::agreement)
      .def_readonly("in_tree", &Report::in_tree)
      .def_readonly("problems", &Report::problems)
      .def_property_readonly("rounds", [](const Report& self) { return self.shape.rounds; })
      .def_property_readonly("max_sent", [](const Report& self) { return self.shape.max_sent; })
      .def_property_readonly("ok", &Report::ok);
}

}  // namespace

void bind_schedule(py::module_& m) {
  bind_edge(m);
  bind_report(m);
  py::class_<Schedule, std::shared_ptr<Schedule>>(m, "Schedule")
      .def_static("generate", &generate, py::arg("collective"), py::arg("algorithm"),
                  py::arg("ranks"), py::arg("root") = 0, py::arg("groups") = Groups{})
      .def_static("parse", &schedule::parse_schedule)
      .def_static("from_edges", &from_edges)
      .def_property_readonly("collective",
                             [](const Schedule& self) { return name_of(self.collective); })
      .def_readonly("name", &Schedule::name)
      .def_readonly("ranks", &Schedule::ranks)
      .def_readonly("chunks", &Schedule::chunks)
      .def_readonly("root", &Schedule::root)
      .def_readonly("rounds", &Schedule::rounds)
      .def("to_text", &schedule::to_text)
      .def("verify", &schedule::verify)
      .def("closed_form", &closed_form, py::arg("groups") = Groups{})
      .def(
          "__eq__", [](const Schedule& self, const Schedule& other) { return self == other; },
          py::is_operator());
  m.def("algorithms", &algorithms);
}

}  // namespace gradwire::bind
