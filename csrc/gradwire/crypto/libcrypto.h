// The functions of OpenSSL's libcrypto that gradwire calls, of version 1.1.1 or 3. They are found
// at run time, so that no build needs OpenSSL. Only functions that both versions have are used.
#pragma once

#include <cstddef>
#include <string>

namespace gradwire::crypto {

// OpenSSL's types, which nobody here looks into.
struct Engine;
struct Digest;
struct CipherKind;
struct CipherContext;
struct PublicKey;
struct PublicKeyContext;

struct Libcrypto {
  std::string version;  // for messages

  CipherContext* (*cipher_context_new)();
  void (*cipher_context_free)(CipherContext*);
  int (*cipher_context_ctrl)(CipherContext*, int type, int number, void* pointer);
  const CipherKind* (*aes_128_gcm)();
  const CipherKind* (*aes_256_gcm)();
  const CipherKind* (*chacha20_poly1305)();
  int (*cipher_init)(CipherContext*, const CipherKind*, Engine*, const unsigned char* key,
                     const unsigned char* nonce, int encrypt);
  int (*cipher_update)(CipherContext*, unsigned char* out, int* written, const unsigned char* in,
                       int bytes);
  int (*cipher_final)(CipherContext*, unsigned char* out, int* written);

  const Digest* (*sha256)();
  int (*digest)(const void* data, std::size_t bytes, unsigned char* out, unsigned* written,
                const Digest*, Engine*);
  unsigned char* (*hmac)(const Digest*, const void* key, int key_bytes, const unsigned char* data,
                         std::size_t bytes, unsigned char* out, unsigned* written);

  PublicKey* (*private_key)(int type, Engine*, const unsigned char* key, std::size_t bytes);
  PublicKey* (*public_key)(int type, Engine*, const unsigned char* key, std::size_t bytes);
  int (*public_bytes)(const PublicKey*, unsigned char* out, std::size_t* bytes);
  void (*key_free)(PublicKey*);
  PublicKeyContext* (*key_context_new)(PublicKey*, Engine*);
  void (*key_context_free)(PublicKeyContext*);
  int (*derive_init)(PublicKeyContext*);
  int (*derive_set_peer)(PublicKeyContext*, PublicKey*);
  int (*derive)(PublicKeyContext*, unsigned char* out, std::size_t* bytes);

  int (*random)(unsigned char* out, int bytes);
  void (*clear_errors)();
  void (*end_thread)();  // frees what the calling thread holds, else its end does
};

// Returns the library, which the first call loads: one that the process has loaded before, or the
// system's. Throws RendezvousError, which names the package to install, where there is none.
const Libcrypto& libcrypto();

// Returns the same, for tests that replace functions by ones that fail.
Libcrypto& replaceable_libcrypto();

// Has libcrypto() load this file instead, for tests. Must be called before libcrypto().
void use_libcrypto(const std::string& file);

}  // namespace gradwire::crypto
