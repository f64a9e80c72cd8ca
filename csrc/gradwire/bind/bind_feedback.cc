#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gradwire/bind/module.h"
#include "gradwire/codec/feedback/feedback.h"

namespace gradwire::bind {
namespace {

using codec::ErrorFeedback;
using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;
using Keys = std::vector<std::pair<std::string, std::size_t>>;
// Residual, tau, filter, calls, memory of each key.
using State = std::map<std::string, std::tuple<Floats, float, float, std::uint64_t, Floats>>;

Floats array_of(std::span<const float> values) {
  return Floats(static_cast<py::ssize_t>(values.size()), values.data());
}

std::vector<float> vector_of(const Floats& values) {
  return {values.data(), values.data() + values.size()};
}

Keys keys(const ErrorFeedback& self) {
  Keys all;
  for (auto& each : self.keys()) all.emplace_back(std::move(each.key), each.count);
  return all;
}

State save(const ErrorFeedback& self) {
  State state;
  for (const auto& [key, kept] : self.save())
    state.try_emplace(key, array_of(kept.residual), kept.codec_state.tau, kept.codec_state.filter,
                      kept.calls, array_of(kept.memory));
  return state;
}

void load(ErrorFeedback& self, const State& state) {
  ErrorFeedback::State kept;
  for (const auto& [key, each] : state) {
    const auto& [residual, tau, filter, calls, memory] = each;
    kept[key] = {vector_of(residual), {.tau = tau, .filter = filter}, calls, vector_of(memory)};
  }
  self.load(std::move(kept));
}

// A method that changes a key's residual by an array of its length.
template <void (ErrorFeedback::*kMethod)(const std::string&, std::span<const float>)>
auto changing() {
  return [](ErrorFeedback& self, const std::string& key, const Floats& values) {
    (self.*kMethod)(key, {values.data(), static_cast<std::size_t>(values.size())});
  };
}

}  // namespace

void bind_feedback(py::module_& m) {
  py::class_<ErrorFeedback, std::shared_ptr<ErrorFeedback>> feedback(m, "ErrorFeedback");
  feedback
      .def(py::init([](bool narrow) {
        using codec::ResidualType;
        return std::make_shared<ErrorFeedback>(narrow ? ResidualType::kBFloat16
                                                      : ResidualType::kFloat32);
      }))
      .def("residual", [](const ErrorFeedback& self,
                          const std::string& key) { return array_of(self.residual(key)); })
      .def(
          "mask",
          [](const ErrorFeedback& self, const std::string& key,
             py::array_t<float, py::array::c_style> values) {
            self.mask(key, {values.mutable_data(), static_cast<std::size_t>(values.size())});
          },
          py::arg("key"), py::arg("values").noconvert())
      .def("keys", &keys)
      .def("add", changing<&ErrorFeedback::add>())
      .def("set", changing<&ErrorFeedback::set>())
      .def("multiply", changing<&ErrorFeedback::multiply>())
      .def("scale", &ErrorFeedback::scale)
      .def("clear", &ErrorFeedback::clear)
      .def("save", &save)
      .def("load", &load)
      .def("begin_step", &ErrorFeedback::begin_step)
      .def("end_step", &ErrorFeedback::end_step);
}

}  // namespace gradwire::bind
