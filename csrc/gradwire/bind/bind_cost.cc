#include <pybind11/stl.h>

#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gradwire/bind/codec_handle.h"
#include "gradwire/bind/module.h"
#include "gradwire/exec/plan/plan_cache.h"
#include "gradwire/schedule/cost.h"
#include "gradwire/transport/emulated_link.h"
#include "gradwire/transport/tcp_traffic.h"

namespace gradwire::bind {
namespace {

using schedule::CostModel;
using Groups = std::vector<std::vector<Rank>>;
using Levels = std::vector<std::tuple<int, double, double, int>>;

std::map<std::string, double> parameters(const CostModel& model) {
  const auto all = model.parameters();
  return {all.begin(), all.end()};
}

schedule::Question question(const CostModel& model, int ranks, double bytes, const Groups& hosts,
                            const CodecHandle* codec, double most_message) {
  schedule::Question out;
  out.ranks = ranks;
  out.bytes = bytes;
  out.hosts = hosts;
  out.most_message = most_message;
  if (codec != nullptr) exec::ask_for(*codec->value, model, out);
  return out;
}

double predict(const CostModel& model, const schedule::Schedule& schedule, double bytes,
               const Groups& hosts, const CodecHandle* codec, double most_message,
               const Levels& levels, double slow) {
  schedule::Question asked = question(model, schedule.ranks, bytes, hosts, codec, most_message);
  asked.network.slow = slow;
  for (const auto& [ranks, beta, latency, uplinks] : levels)
    asked.network.levels.push_back({ranks, beta, latency, uplinks, {}});
  return schedule::predict(model, schedule, asked);
}

double predict_gathered(const CostModel& model, const schedule::Schedule& all_gather, double bytes,
                        const Groups& hosts) {
  const schedule::Question by_default;
  return schedule::predict_gathered(
      model, all_gather,
      question(model, all_gather.ranks, bytes, hosts, nullptr, by_default.most_message));
}

std::tuple<std::string, std::size_t, double> choose(const CostModel& model,
                                                    const std::string& collective, int ranks,
                                                    double bytes, const Groups& hosts,
                                                    const CodecHandle* codec, Rank root,
                                                    double most_message) {
  schedule::Question asked = question(model, ranks, bytes, hosts, codec, most_message);
  asked.collective = parse_collective(collective);
  asked.root = root;
  const schedule::Choice choice = schedule::choose(model, asked);
  return {choice.algorithm, choice.segment_bytes, choice.seconds};
}

}  // namespace

void bind_cost(py::module_& m) {
  const schedule::Question by_default;
  py::class_<CostModel>(m, "CostModel")
      .def(py::init(&exec::built_in_model))
      .def("set", &CostModel::set)
      .def_property_readonly("parameters", &parameters)
      .def_property_readonly("digest", &CostModel::digest)
      .def("predict", &predict, py::arg("schedule"), py::arg("bytes"),
           py::arg("hosts") = by_default.hosts, py::arg("codec") = nullptr,
           py::arg("most_message") = by_default.most_message, py::arg("levels") = Levels{},
           py::arg("slow") = by_default.network.slow)
      .def("predict_gathered", &predict_gathered, py::arg("all_gather"), py::arg("bytes"),
           py::arg("hosts") = by_default.hosts)
      .def("choose", &choose, py::arg("collective"), py::arg("ranks"), py::arg("bytes"),
           py::arg("hosts") = by_default.hosts, py::arg("codec") = nullptr, py::arg("root") = 0,
           py::arg("most_message") = by_default.most_message);
  m.def("link_costs", [](const std::string& spec) {
    const transport::EmulatedLink link(spec);
    return std::pair(link.seconds_of_byte(), link.seconds_under_way());
  });
  // Bits per second; 0 without a limit.
  m.def("rate_now", [](const std::string& spec) { return transport::RateOfDay(spec).now(); });
}

}  // namespace gradwire::bind
