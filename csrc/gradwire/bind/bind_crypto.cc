#include <pybind11/stl.h>

#include <string>
#include <string_view>

#include "gradwire/base/cpu.h"
#include "gradwire/base/error.h"
#include "gradwire/bind/module.h"
#include "gradwire/crypto/noise.h"
#include "gradwire/crypto/primitives.h"

namespace gradwire::bind {

using crypto::Cipher;
using crypto::KeyPair;
using crypto::Noise;
using crypto::Seal;

namespace {

ConstBytes view(const py::bytes& data) { return crypto::bytes_of(std::string_view(data)); }

py::bytes to_python(ConstBytes data) {
  return {reinterpret_cast<const char*>(data.data()), data.size()};
}

crypto::Key key_of(const py::bytes& data) {
  const ConstBytes bytes = view(data);
  if (bytes.size() != crypto::kKeyBytes) throw InvalidArgument("a key has 32 bytes");
  return crypto::Key(bytes);
}

std::unique_ptr<Noise> make_noise(bool initiator, const py::bytes& prologue, const py::bytes& psk,
                                  const std::optional<py::bytes>& ephemeral) {
  std::optional<KeyPair> fixed;
  if (ephemeral) fixed.emplace(key_of(*ephemeral));
  const auto role = initiator ? crypto::Role::kInitiator : crypto::Role::kResponder;
  return std::make_unique<Noise>(role, view(prologue), view(psk), std::move(fixed));
}

py::bytes opened(Seal& self, const py::bytes& arrived) {
  const auto plain = self.opened(std::string_view(arrived));
  if (!plain) throw TransportError(crypto::kChanged, kNoPeer);
  return py::bytes(*plain);
}

void bind_noise(py::module_& m) {
  py::class_<Noise>(m, "Noise")
      .def(py::init(&make_noise), py::arg("initiator"), py::arg("prologue"), py::arg("psk"),
           py::arg("ephemeral") = py::none())
      .def("write", [](Noise& self,
                       const py::bytes& payload) { return to_python(self.write(view(payload))); })
      .def("read", [](Noise& self,
                      const py::bytes& message) { return to_python(self.read(view(message))); })
      .def_property_readonly("hash", [](const Noise& self) { return to_python(self.hash()); })
      .def("seal", &Noise::seal);
}

}  // namespace

void bind_crypto(py::module_& m) {
  py::enum_<Cipher>(m, "Cipher")
      .value("AES_128_GCM", Cipher::kAes128Gcm)
      .value("AES_256_GCM", Cipher::kAes256Gcm)
      .value("CHACHA20_POLY1305", Cipher::kChaCha20Poly1305);
  py::class_<Seal, std::shared_ptr<Seal>>(m, "Seal")
      .def_property_readonly("cipher", &Seal::cipher)
      .def("records",
           [](Seal& self, const py::bytes& plain) {
             return py::bytes(self.records(std::string_view(plain)));
           })
      .def("opened", &opened)
      .def_property_readonly("missing", &Seal::missing);
  bind_noise(m);
  // Like all calls here it holds the interpreter's lock, and so does os.fork(): no child finds a
  // lock of libcrypto held by a thread that it does not have. Python's hmac lets go of it
  // meanwhile.
  m.def("hmac_sha256", [](const py::bytes& key, const py::bytes& data) {
    return to_python(crypto::hmac_sha256(view(key), {view(data)}).bytes());
  });
  m.def("end_libcrypto_thread", [] { crypto::libcrypto().end_thread(); });
  m.attr("NOISE_OVERHEAD") = Noise::kOverhead;
  m.def("has_aes", &has_aes);
  m.def("libcrypto_version", [] { return crypto::libcrypto().version; });
  m.def("use_libcrypto", &crypto::use_libcrypto);
}

}  // namespace gradwire::bind
