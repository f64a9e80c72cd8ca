#include "gradwire/crypto/libcrypto.h"

#include <dlfcn.h>

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

template <typename Function>
void find(void* handle, Function& function, const char* name) {
  void* found = ::dlsym(handle, name);
  if (found == nullptr) throw_missing(std::string("it has no function ") + name);
  function = reinterpret_cast<Function>(found);
}

void find_ciphers(void* handle, Libcrypto& found) {
  find(handle, found.cipher_context_new, "EVP_CIPHER_CTX_new");
  find(handle, found.cipher_context_free, "EVP_CIPHER_CTX_free");
  find(handle, found.cipher_context_ctrl, "EVP_CIPHER_CTX_ctrl");
  find(handle, found.aes_128_gcm, "EVP_aes_128_gcm");
  find(handle, found.aes_256_gcm, "EVP_aes_256_gcm");
  find(handle, found.chacha20_poly1305, "EVP_chacha20_poly1305");
  find(handle, found.cipher_init, "EVP_CipherInit_ex");
  find(handle, found.cipher_update, "EVP_CipherUpdate");
  find(handle, found.cipher_final, "EVP_CipherFinal_ex");
}

void find_keys(void* handle, Libcrypto& found) {
  find(handle, found.private_key, "EVP_PKEY_new_raw_private_key");
  find(handle, found.public_key, "EVP_PKEY_new_raw_public_key");
  find(handle, found.public_bytes, "EVP_PKEY_get_raw_public_key");
  find(handle, found.key_free, "EVP_PKEY_free");
  find(handle, found.key_context_new, "EVP_PKEY_CTX_new");
  find(handle, found.key_context_free, "EVP_PKEY_CTX_free");
  find(handle, found.derive_init, "EVP_PKEY_derive_init");
  find(handle, found.derive_set_peer, "EVP_PKEY_derive_set_peer");
  find(handle, found.derive, "EVP_PKEY_derive");
}

Libcrypto load() {
  void* handle = open_any();
  if (handle == nullptr) {
    const char* why = ::dlerror();
    throw_missing(why == nullptr ? "it does not load" : why);
  }
  Libcrypto found{};
  find_ciphers(handle, found);
  find_keys(handle, found);
  find(handle, found.sha256, "EVP_sha256");
  find(handle, found.digest, "EVP_Digest");
  find(handle, found.hmac, "HMAC");
  find(handle, found.random, "RAND_bytes");
  find(handle, found.clear_errors, "ERR_clear_error");
  find(handle, found.end_thread, "OPENSSL_thread_stop");
  const char* (*version)(int) = nullptr;
  find(handle, version, "OpenSSL_version");
  found.version = version(0);
  return found;
}

}  // namespace

void use_libcrypto(const std::string& file) { names() = {file}; }

const Libcrypto& libcrypto() { return replaceable_libcrypto(); }

Libcrypto& replaceable_libcrypto() {
  static Libcrypto loaded = load();  // tried anew after it has thrown
  return loaded;
}

}  // namespace gradwire::crypto
