#include "gradwire/crypto/libcrypto.h"

#include <vector>

#include "gradwire/base/error.h"

namespace gradwire::crypto {
namespace {

std::vector<std::string>& names() {
  static std::vector<std::string> found = {"libcrypto.so.3", "libcrypto.so.1.1"};
  return found;
}

// Returns a handle that is never closed; null where there is no such library.
void* open_any() {
  for (const int loaded : {RTLD_NOLOAD, 0})  // first one that Python's own modules use
    for (const std::string& name : names())
      if (void* handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | loaded)) return handle;
  return nullptr;
}

[[noreturn]] void throw_missing(const std::string& why) {
  throw RendezvousError(
      "OpenSSL's libcrypto, with which ranks prove themselves and encrypt, is not usable here (" +
      why +
      "): install version 3 or 1.1.1 of it (Debian, Ubuntu: apt-get install libssl3; Fedora: "
      "dnf install openssl-libs)");
}

}  // namespace

Libcrypto::Finder::Finder() : handle(open_any()) {
  if (handle == nullptr) throw_missing(loader_error());
}

Symbol Libcrypto::Finder::operator()(const char* name) const {
  const Symbol found{::dlsym(handle, name)};
  if (found.address == nullptr) throw_missing(std::string("it has no function ") + name);
  return found;
}

void use_libcrypto(const std::string& file) { names() = {file}; }

const Libcrypto& libcrypto() { return replaceable_libcrypto(); }

Libcrypto& replaceable_libcrypto() {
  static Libcrypto loaded;  // tried anew after it has thrown
  return loaded;
}

}  // namespace gradwire::crypto
