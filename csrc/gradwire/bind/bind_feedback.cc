#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gradwire/bind/module.h"
#include "gradwire/codec/feedback.h"

namespace gradwire::bind {
namespace {

using codec::ErrorFeedback;
using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;
using Keys = std::vector<std::pair<std::string, std::size_t>>;

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

void bind_state(py::class_<ErrorFeedback, std::shared_ptr<ErrorFeedback>>& c) {
  c.def(
       "save",
       [](const ErrorFeedback& self, const std::string& key) {
         const auto kept = self.save(key);
         return py::make_tuple(array_of(kept.residual), kept.adapted, array_of(kept.memory));
       },
       py::arg("key"))
      .def(
          "load",
          [](ErrorFeedback& self, const std::string& key, const Floats& residual, float adapted,
             const Floats& memory) {
            self.load(key, {vector_of(residual), adapted, vector_of(memory)});
          },
          py::arg("key"), py::arg("residual"), py::arg("adapted"), py::arg("memory"));
}

}  // namespace

void bind_feedback(py::module_& m) {
  py::class_<ErrorFeedback, std::shared_ptr<ErrorFeedback>> feedback(m, "ErrorFeedback");
  feedback.def(py::init())
      .def(
          "residual",
          [](const ErrorFeedback& self, const std::string& key) {
            return array_of(self.residual(key));
          },
          py::arg("key"))
      .def("keys", &keys)
      .def(
          "add",
          [](ErrorFeedback& self, const std::string& key, const Floats& values) {
            self.add(key, {values.data(), static_cast<std::size_t>(values.size())});
          },
          py::arg("key"), py::arg("values"))
      .def("scale", &ErrorFeedback::scale, py::arg("factor"))
      .def("clear", &ErrorFeedback::clear)
      .def("begin_step", &ErrorFeedback::begin_step)
      .def("end_step", &ErrorFeedback::end_step, py::arg("keep"));
  bind_state(feedback);
}

}  // namespace gradwire::bind
