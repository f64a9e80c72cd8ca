// SHA-256, HMAC, X25519 and authenticated encryption, by libcrypto. All throw RendezvousError where
// there is none. What they hold is wiped at its end.
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
  // Returns the secret shared with the owner of another public key, of 32 bytes. Throws
  // TransportError for one with which everybody shares the same.
  Key agree(ConstBytes other) const;

 private:
  std::unique_ptr<PublicKey, Free> key_;
  std::array<std::byte, kKeyBytes> public_{};
};

enum class Cipher : std::uint8_t { kAes128Gcm, kAes256Gcm, kChaCha20Poly1305 };

inline constexpr std::size_t kTagBytes = 16;
enum class Direction : int { kOpen = 0, kSeal = 1 };

// One key, used in one direction, with a counter of its own as the nonce. It takes the next key
// every 2^20 messages, long before AES-GCM's bounds, by a one-way step that both ends make.
class Aead {
 public:
  Aead(Cipher cipher, const Key& key, Direction direction);

  // Does what needs no bytes of the next message. Whoever has nothing else to do calls it, so that
  // seal() or open() takes less time then.
  void prepare() noexcept;
  // Encrypts `plain` into `out`, of kTagBytes more; `out` may be the same memory. `associated` is
  // covered, but stays as it is.
  void seal(ConstBytes associated, ConstBytes plain, std::byte* out);
  // Decrypts into `out`, of kTagBytes fewer, which may be the same memory. Returns whether the
  // bytes are those that the other end has sealed, in their order; otherwise `out` is worth
  // nothing.
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
