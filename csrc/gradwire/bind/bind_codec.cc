#include <pybind11/stl.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include "gradwire/base/error.h"
#include "gradwire/bind/codec_handle.h"
#include "gradwire/bind/module.h"
#include "gradwire/codec/simd/simd.h"

namespace gradwire::bind {
namespace {

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const codec::Kernels* each : codec::available_kernels()) names.emplace_back(each->name);
  return names;
}

std::vector<std::string> codec_names() {
  const auto names = codec::codec_names();
  return {names.begin(), names.end()};
}

// y[i] := x[i] * factor, rounded once in the element type; y may be x.
void scale(const std::string& dtype, std::uintptr_t x, std::uintptr_t y, std::size_t count,
           double factor) {
  const DType type = parse_dtype(dtype);
  const auto kernel = codec::kernels().scale[static_cast<std::size_t>(type)];
  if (kernel == nullptr) throw InvalidArgument(dtype + " cannot be scaled");
  auto* to = reinterpret_cast<void*>(y);
  if (x != y) std::memcpy(to, reinterpret_cast<const void*>(x), count * size_of(type));
  kernel(to, factor, count);
}

}  // namespace

void bind_codec(py::module_& m) {
  py::class_<Codec>(m, "Codec")
      .def(py::init([](const std::string& spec) { return Codec{codec::make_codec(spec)}; }),
           py::arg("spec"))
      .def_property_readonly("name", [](const Codec& self) { return self.value->name(); })
      .def_property_readonly(
          "compound",
          [](const Codec& self) { return self.value->combine() == codec::Combine::kCompound; })
      .def_property_readonly("biased", [](const Codec& self) { return self.value->biased(); })
      .def(
          "max_bytes",
          [](const Codec& self, std::size_t count) { return self.value->max_bytes(count); },
          py::arg("count"));
  m.def("codec_names", &codec_names);
  m.def("scale", &scale, py::arg("dtype"), py::arg("x"), py::arg("y"), py::arg("count"),
        py::arg("factor"), py::call_guard<Unlocked>());
  m.def("instruction_sets", &instruction_sets);
  m.def("active_instruction_set", [] { return std::string(codec::kernels().name); });
}

}  // namespace gradwire::bind
