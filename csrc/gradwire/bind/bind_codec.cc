#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "gradwire/base/error.h"
#include "gradwire/bind/codec_handle.h"
#include "gradwire/bind/module.h"
#include "gradwire/codec/payload.h"
#include "gradwire/codec/simd/simd.h"

namespace gradwire::bind {
namespace {

std::vector<std::string_view> instruction_sets() {
  std::vector<std::string_view> names;
  for (const codec::Kernels* each : codec::available_kernels()) names.emplace_back(each->name);
  return names;
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

// Writes the payload of x[0, count) to `out`, of exactly max_bytes(count).
void encode(const CodecHandle& self, std::uintptr_t x, std::size_t count, std::uintptr_t out) {
  const codec::Codec& codec = *self.value;
  if (!codec.fixed_size() || codec.combine() == codec::Combine::kCompound)
    throw InvalidArgument("codec '" + codec.name() + "' has payloads of no fixed size");
  const codec::FloatEnvironment environment;
  codec.encode(reinterpret_cast<const float*>(x), count, {},
               {reinterpret_cast<std::byte*>(out), codec.max_bytes(count)});
}

// Writes the `count` elements of a payload of max_bytes(count) to `y`.
void decode(const CodecHandle& self, std::uintptr_t in, std::size_t count, std::uintptr_t y) {
  const codec::Codec& codec = *self.value;
  const codec::FloatEnvironment environment;
  codec.decode({reinterpret_cast<const std::byte*>(in), codec.max_bytes(count)},
               reinterpret_cast<float*>(y), count);
}

using Payload = py::array_t<std::uint8_t, py::array::c_style>;

Payload encode_array(const CodecHandle& self, std::uintptr_t x, std::size_t rows,
                     std::size_t columns, const std::shared_ptr<codec::ErrorFeedback>& feedback,
                     const std::string& key, std::uint64_t call) {
  const codec::MatrixShape shape{rows, columns};
  const auto room = static_cast<py::ssize_t>(codec::most_payload(*self.value, shape));
  Payload payload(room);
  auto* const out = reinterpret_cast<std::byte*>(payload.mutable_data());
  py::ssize_t bytes = 0;
  {
    const Unlocked unlocked;
    bytes = static_cast<py::ssize_t>(
        codec::encode_array(*self.value, reinterpret_cast<const float*>(x), shape,
                            {out, static_cast<std::size_t>(room)}, feedback.get(), key, call));
  }
  return bytes == room ? payload : Payload(bytes, payload.data());
}

void decode_array(const CodecHandle& self, const Payload& payload, std::size_t rows,
                  std::size_t columns, std::uintptr_t y) {
  const ConstBytes in{reinterpret_cast<const std::byte*>(payload.data()),
                      static_cast<std::size_t>(payload.size())};
  const Unlocked unlocked;
  codec::decode_array(*self.value, in, {rows, columns}, reinterpret_cast<float*>(y));
}

}  // namespace

void bind_codec(py::module_& m) {
  py::class_<CodecHandle>(m, "Codec")
      .def(py::init([](const std::string& spec) { return CodecHandle{codec::make_codec(spec)}; }))
      .def_property_readonly("name", on<const CodecHandle, &codec::Codec::name>)
      .def_property_readonly(
          "exact",
          [](const CodecHandle& self) { return self.value->combine() == codec::Combine::kPlain; })
      .def_property_readonly("seconds_per_byte",
                             [](const CodecHandle& self) {
                               const codec::SecondsPerByte& its = self.value->seconds_per_byte();
                               return std::pair(its.encode, its.decode);
                             })
      .def_property_readonly("compound",
                             [](const CodecHandle& self) {
                               return self.value->combine() == codec::Combine::kCompound;
                             })
      .def_property_readonly("biased", on<const CodecHandle, &codec::Codec::biased>)
      .def("usual_bytes", on<const CodecHandle, &codec::Codec::usual_bytes, std::size_t>)
      .def("max_bytes", on<const CodecHandle, &codec::Codec::max_bytes, std::size_t>)
      .def("encode", &encode, py::call_guard<Unlocked>())
      .def("decode", &decode, py::call_guard<Unlocked>())
      .def("encode_array", &encode_array)
      .def("decode_array", &decode_array, py::arg("payload").noconvert(), py::arg("rows"),
           py::arg("columns"), py::arg("y"))
      .def("most_payload", [](const CodecHandle& self, std::size_t rows, std::size_t columns) {
        return codec::most_payload(*self.value, {rows, columns});
      });
  m.def("codec_names", &codec::codec_names);
  m.def("scale", &scale, py::call_guard<Unlocked>());
  m.def("instruction_sets", &instruction_sets);
  m.def("active_instruction_set", [] { return codec::kernels().name; });
}

}  // namespace gradwire::bind
