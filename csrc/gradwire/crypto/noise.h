// Noise: the handshake Noise_NNpsk0_25519_AESGCM_SHA256 (noiseprotocol.org, revision 34). Both ends
// know a pre-shared key; each brings a fresh X25519 key, so that who learns the former later cannot
// decrypt what was recorded.
//
//   -> psk, e      the initiator's first message
//   <- e, ee       the responder's; from then on both have keys that nobody else has
//
// The initiator's first message can be repeated by anybody who has recorded it. So a responder must
// not believe in the initiator before it has read a third one.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "gradwire/crypto/seal.h"

namespace gradwire::crypto {

enum class Role { kInitiator, kResponder };

class Noise {
 public:
  using Message = std::vector<std::byte>;
  static constexpr std::size_t kOverhead = kKeyBytes + kTagBytes;  // of the first two messages

  // `prologue` is what both ends have said before; `psk` has 32 bytes. Both ends must give the
  // same. Throws InvalidArgument for a key of another size. A fixed key pair is for tests.
  Noise(Role role, ConstBytes prologue, ConstBytes psk, std::optional<KeyPair> fixed = {});

  // Returns the next message, with an encrypted payload. Ends take turns in the first two.
  Message write(ConstBytes payload);
  // Returns the payload of the other end's next message. Throws TransportError where the other end
  // has another pre-shared key or prologue, or the message was changed.
  Message read(ConstBytes message);

  // The hash of all that both ends have said, after two messages.
  ConstBytes hash() const noexcept { return hash_.bytes(); }
  // Returns keys for the socket, for this cipher: the same at both ends after two messages.
  std::shared_ptr<Seal> seal(Cipher cipher) const;

 private:
  void mix_hash(ConstBytes data) { hash_ = sha256({hash_.bytes(), data}); }
  void mix_key(ConstBytes input);
  void mix_key_and_hash(ConstBytes input);
  void mix_public(ConstBytes key);  // `e` of either end
  Message encrypt_and_hash(ConstBytes plain);
  Message decrypt_and_hash(ConstBytes sealed);
  bool in_handshake() const noexcept { return turn_ < 2; }
  void end_turn();
  void require_turn(Role of) const;

  Role role_;
  KeyPair own_;
  Key other_;  // public
  Key chain_, hash_;
  Key cipher_key_;
  int turn_ = 0;  // messages of the handshake so far
  Key send_, receive_;
  std::optional<Aead> sends_, receives_;
};

}  // namespace gradwire::crypto
