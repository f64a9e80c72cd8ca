// SHA-256, HMAC, X25519 and authenticated encryption, by libcrypto. All throw RendezvousError where
// libcrypto is missing. Keys are wiped when they are destroyed.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string_view>

#include "gradwire/base/types.h"
#include "gradwire/crypto/libcrypto.h"
#include "gradwire/crypto/secret.h"

namespace gradwire::crypto {

inline ConstBytes bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

void fill_random(Bytes out);
Key sha256(std::initializer_list<ConstBytes> parts);
Key hmac_sha256(ConstBytes key, std::initializer_list<ConstBytes> parts);

// Frees what libcrypto has made.
struct Free {
  void operator()(PublicKey* key) const noexcept { libcrypto().key_free(key); }
  void operator()(PublicKeyContext* context) const noexcept {
    libcrypto().key_context_free(context);
  }
  void operator()(CipherContext* context) const noexcept {
    libcrypto().cipher_context_free(context);
  }
};

// An X25519 key pair (RFC 7748).
class KeyPair {
 public:
  KeyPair();                                 // of a fresh random key
  explicit KeyPair(const Key& private_key);  // for tests with published keys

  ConstBytes public_key() const noexcept { return public_; }
  // Returns the secret shared with the owner of another public key of 32 bytes. Throws
  // TransportError for a weak key, with which everybody would share the same secret.
  Key agree(ConstBytes other) const;

 private:
  std::unique_ptr<PublicKey, Free> key_;
  std::array<std::byte, kKeyBytes> public_{};
};

enum class Cipher : std::uint8_t { kAes128Gcm, kAes256Gcm, kChaCha20Poly1305 };

inline constexpr std::size_t kTagBytes = 16;
enum class Direction : int { kOpen = 0, kSeal = 1 };

// One key for one direction, with a counter as the nonce. Both ends derive the next key every 2^20
// messages, long before AES-GCM's bounds.
class Aead {
 public:
  Aead(Cipher cipher, const Key& key, Direction direction);

  // Prepares for the next message, as far as that needs no bytes of it. To be called when there is
  // nothing else to do: seal() or open() then takes less time.
  void prepare() noexcept;
  // Encrypts `plain` into `out`, which has kTagBytes more and may be the same memory. `associated`
  // is authenticated, but not encrypted.
  void seal(ConstBytes associated, ConstBytes plain, std::byte* out);
  // Decrypts into `out`, which has kTagBytes fewer and may be the same memory. Returns whether the
  // bytes are the other end's next sealed message; if not, the contents of `out` are unspecified.
  [[nodiscard]] bool open(ConstBytes associated, ConstBytes sealed, std::byte* out);

 private:
  void set_key();
  void next_nonce();
  bool set_nonce() noexcept;
  bool run(ConstBytes associated, ConstBytes in, std::byte* out);

  Cipher cipher_;
  Key key_;
  Direction direction_;
  std::unique_ptr<CipherContext, Free> context_;
  std::uint64_t count_ = 0;  // of messages
  bool prepared_ = false;    // the next one
};

}  // namespace gradwire::crypto
