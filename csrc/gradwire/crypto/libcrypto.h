// The functions of OpenSSL's libcrypto that gradwire calls, of version 1.1.1 or 3. The library is
// loaded at run time, so that no build needs OpenSSL. Only functions of both versions are used.
#pragma once

#include <cstddef>
#include <string>

#include "gradwire/base/dynamic_library.h"

namespace gradwire::crypto {

// OpenSSL's opaque types.
struct Engine;
struct Digest;
struct CipherKind;
struct CipherContext;
struct PublicKey;
struct PublicKeyContext;

struct Libcrypto {
  // Finds a function of the library, which is loaded first. Throws as libcrypto() does.
  struct Finder {
    Finder();
    Symbol operator()(const char* name) const;

    void* handle;  // never closed
  } find{};

  CipherContext* (*cipher_context_new)() = find("EVP_CIPHER_CTX_new");
  void (*cipher_context_free)(CipherContext*) = find("EVP_CIPHER_CTX_free");
  int (*cipher_context_ctrl)(CipherContext*, int type, int number,
                             void* pointer) = find("EVP_CIPHER_CTX_ctrl");
  const CipherKind* (*aes_128_gcm)() = find("EVP_aes_128_gcm");
  const CipherKind* (*aes_256_gcm)() = find("EVP_aes_256_gcm");
  const CipherKind* (*chacha20_poly1305)() = find("EVP_chacha20_poly1305");
  int (*cipher_init)(CipherContext*, const CipherKind*, Engine*, const unsigned char* key,
                     const unsigned char* nonce, int encrypt) = find("EVP_CipherInit_ex");
  int (*cipher_update)(CipherContext*, unsigned char* out, int* written, const unsigned char* in,
                       int bytes) = find("EVP_CipherUpdate");
  int (*cipher_final)(CipherContext*, unsigned char* out,
                      int* written) = find("EVP_CipherFinal_ex");

  const Digest* (*sha256)() = find("EVP_sha256");
  int (*digest)(const void* data, std::size_t bytes, unsigned char* out, unsigned* written,
                const Digest*, Engine*) = find("EVP_Digest");
  unsigned char* (*hmac)(const Digest*, const void* key, int key_bytes, const unsigned char* data,
                         std::size_t bytes, unsigned char* out, unsigned* written) = find("HMAC");

  PublicKey* (*private_key)(int type, Engine*, const unsigned char* key,
                            std::size_t bytes) = find("EVP_PKEY_new_raw_private_key");
  PublicKey* (*public_key)(int type, Engine*, const unsigned char* key,
                           std::size_t bytes) = find("EVP_PKEY_new_raw_public_key");
  int (*public_bytes)(const PublicKey*, unsigned char* out,
                      std::size_t* bytes) = find("EVP_PKEY_get_raw_public_key");
  void (*key_free)(PublicKey*) = find("EVP_PKEY_free");
  PublicKeyContext* (*key_context_new)(PublicKey*, Engine*) = find("EVP_PKEY_CTX_new");
  void (*key_context_free)(PublicKeyContext*) = find("EVP_PKEY_CTX_free");
  int (*derive_init)(PublicKeyContext*) = find("EVP_PKEY_derive_init");
  int (*derive_set_peer)(PublicKeyContext*, PublicKey*) = find("EVP_PKEY_derive_set_peer");
  int (*derive)(PublicKeyContext*, unsigned char* out,
                std::size_t* bytes) = find("EVP_PKEY_derive");

  int (*random)(unsigned char* out, int bytes) = find("RAND_bytes");
  void (*clear_errors)() = find("ERR_clear_error");
  // Frees what the calling thread holds; else its end does.
  void (*end_thread)() = find("OPENSSL_thread_stop");

  const char* (*version_text)(int what) = find("OpenSSL_version");
  std::string version = version_text(0);  // for messages
};

// Returns the library, which the first call loads: one that the process has loaded before, or the
// system's. Throws RendezvousError, which names the package to install, where there is none.
const Libcrypto& libcrypto();

// Returns the same, for tests that replace functions by ones that fail.
Libcrypto& replaceable_libcrypto();

// Has libcrypto() load this file instead, for tests. Must be called before libcrypto().
void use_libcrypto(const std::string& file);

}  // namespace gradwire::crypto
