#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gradwire/base/error.h"
#include "gradwire/bind/module.h"
#include "gradwire/codec/feedback/residuals.h"
#include "gradwire/exec/execution/feedback_view.h"
#include "gradwire/exec/program/cpu_device.h"

namespace gradwire::bind {
namespace {

using codec::ErrorFeedback;
using exec::ExchangePayloads;
using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;
using Keys = std::vector<std::pair<std::string, std::size_t>>;

std::shared_ptr<ExchangePayloads> open(std::shared_ptr<ErrorFeedback> feedback, const Keys& keys) {
  auto payloads = std::make_shared<ExchangePayloads>();
  if (!feedback) return payloads;
  std::vector<codec::KeyedArray> arrays;
  for (const auto& [key, count] : keys) arrays.push_back({key, count});
  payloads->feedback = std::move(feedback);
  payloads->transaction.open(*payloads->feedback, arrays);
  return payloads;
}

Floats residual(const ExchangePayloads& self, std::size_t key) {
  const auto values = self.transaction.residual(key);
  return Floats(static_cast<py::ssize_t>(values.size()), values.data());
}

void write_next(ExchangePayloads& self, std::size_t key, const Floats& values, Rank rank) {
  if (static_cast<std::size_t>(values.size()) != self.transaction.size(key))
    throw InvalidArgument("a residual has the length of its key");
  codec::EncodeContext context = self.transaction.context(key);
  exec::number(context, rank, /*operation=*/0);
  codec::keep(context, values.data(), self.transaction.size(key));
}

void seal(ExchangePayloads& self, const py::bytes& own, bool finite, std::size_t limit) {
  const auto bytes = std::as_bytes(std::span(std::string_view(own)));
  self.own.assign(bytes.begin(), bytes.end());
  self.finite = finite;
  self.limit = limit;
}

// Returns all payloads, one after the other, without a copy.
py::buffer_info bytes_of(ExchangePayloads& self) {
  return {reinterpret_cast<std::uint8_t*>(self.all.data()),
          static_cast<py::ssize_t>(self.all.size()), /*readonly=*/true};
}

}  // namespace

void bind_exchange(py::module_& m) {
  py::class_<ExchangePayloads, std::shared_ptr<ExchangePayloads>>(m, "ExchangePayloads",
                                                                  py::buffer_protocol())
      .def(py::init(&open))
      .def("residual", &residual)
      .def("write_next", &write_next)
      .def("seal", &seal, py::arg("own"), py::arg("finite"), py::arg("limit"))
      .def("settle", [](ExchangePayloads& self, bool keep) { self.transaction.settle(keep); })
      .def("cancel", [](ExchangePayloads& self) { self.transaction.cancel(); })
      .def_buffer(&bytes_of)
      .def_readonly("ends", &ExchangePayloads::ends)
      .def_readonly("all_finite", &ExchangePayloads::all_finite);
}

}  // namespace gradwire::bind
