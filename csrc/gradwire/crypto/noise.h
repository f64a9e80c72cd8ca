// Noise: the handshake Noise_NNpsk0_25519_AESGCM_SHA256 (noiseprotocol.org, revision 34). Both ends
// know a pre-shared key; each brings a fresh X25519 key, so that the pre-shared key does not
// decrypt recorded traffic (forward secrecy).
//
//   -> psk, e      the initiator's first message
//   <- e, ee       the responder's; from then on both have keys of their own
//
// The first message can be replayed by anybody who has recorded it. So a responder must not trust
// the initiator before it has read a third message.
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

  // `prologue`: what both ends have exchanged before. `psk`: the pre-shared key of 32 bytes; throws
  // InvalidArgument for another size. Both must be the same at both ends. `fixed` is for tests.
  Noise(Role role, ConstBytes prologue, ConstBytes psk, std::optional<KeyPair> fixed = {});

  // Returns the next message, with an encrypted payload. Ends take turns in the first two.
  Message write(ConstBytes payload);
  // Returns the payload of the other end's next message. Throws TransportError where the other end
  // has another pre-shared key or prologue, or the message was changed.
  Message read(ConstBytes message);

  // Returns the hash of all that both ends have exchanged, after two messages.
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
