#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gradwire/bind/module.h"
#include "gradwire/codec/feedback.h"
#include "gradwire/exec/exchange.h"

namespace gradwire::bind {
namespace {

using codec::ErrorFeedback;
using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;
using Keys = std::vector<std::pair<std::string, std::size_t>>;
using exec::Letters;

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

// One call's keys, open; for codecs that run in Python.
struct Transaction {
  std::shared_ptr<ErrorFeedback> owner;
  std::vector<std::size_t> counts;
  ErrorFeedback::Transaction open;

  Transaction(std::shared_ptr<ErrorFeedback> feedback, const Keys& keyed)
      : owner(std::move(feedback)) {
    std::vector<codec::KeyedExtent> extents;
    for (const auto& [key, count] : keyed) {
      extents.push_back({key, count});
      counts.push_back(count);
    }
    open.open(*owner, extents);
  }
};

void write_next(Transaction& self, std::size_t extent, const Floats& values) {
  const auto next = self.open.next(extent);
  if (static_cast<std::size_t>(values.size()) != next.size())
    throw py::value_error("a residual has the length of its key");
  std::copy_n(values.data(), next.size(), next.begin());
}

std::shared_ptr<Letters> make_letters(const std::string& own, bool finite, std::size_t limit) {
  auto letters = std::make_shared<Letters>();
  const auto bytes = std::as_bytes(std::span(own));
  letters->own.assign(bytes.begin(), bytes.end());
  letters->finite = finite;
  letters->limit = limit;
  return letters;
}

std::vector<py::bytes> all_letters(const Letters& letters) {
  std::vector<py::bytes> all;
  for (const auto& each : letters.all)
    all.emplace_back(reinterpret_cast<const char*>(each.data()), each.size());
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
  py::class_<Transaction>(m, "Transaction")
      .def(py::init<std::shared_ptr<ErrorFeedback>, const Keys&>(), py::arg("feedback"),
           py::arg("keys"))
      .def(
          "residual",
          [](const Transaction& self, std::size_t extent) {
            return array_of(self.open.residual(extent));
          },
          py::arg("extent"))
      .def("write_next", &write_next, py::arg("extent"), py::arg("values"))
      .def("settle", [](Transaction& self, bool keep) { self.open.settle(keep); }, py::arg("keep"));
  py::class_<Letters, std::shared_ptr<Letters>>(m, "Letters")
      .def(py::init(&make_letters), py::arg("own"), py::arg("finite"), py::arg("limit"))
      .def_property_readonly("all", &all_letters)
      .def_property_readonly("all_finite", [](const Letters& self) { return self.all_finite; });
}

}  // namespace gradwire::bind
