#include "gradwire/crypto/noise.h"

#include <string>

#include "gradwire/base/error.h"

namespace gradwire::crypto {
namespace {

constexpr std::string_view kName = "Noise_NNpsk0_25519_AESGCM_SHA256";
static_assert(kName.size() == kKeyBytes);  // so it is the first hash as it stands

constexpr std::byte kOne{1}, kTwo{2}, kThree{3};

// HKDF with three outputs (Noise, sec. 4.3); the first two are those of HKDF with two.
struct Keys {
  Key first, second, third;

  Keys(const Key& chain, ConstBytes input) {
    const Key base = hmac_sha256(chain.bytes(), {input});
    first = hmac_sha256(base.bytes(), {{&kOne, 1}});
    second = hmac_sha256(base.bytes(), {first.bytes(), {&kTwo, 1}});
    third = hmac_sha256(base.bytes(), {second.bytes(), {&kThree, 1}});
  }
};

std::string_view label_of(Cipher cipher) {
  switch (cipher) {
    case Cipher::kAes128Gcm:
      return "gradwire/2 records AES-128-GCM";
    case Cipher::kAes256Gcm:
      return "gradwire/2 records AES-256-GCM";
    case Cipher::kChaCha20Poly1305:
      return "gradwire/2 records ChaCha20-Poly1305";
  }
  return "";
}

}  // namespace

Noise::Noise(Role role, ConstBytes prologue, ConstBytes psk, std::optional<KeyPair> fixed)
    : role_(role),
      own_(fixed ? std::move(*fixed) : KeyPair()),
      chain_(bytes_of(kName)),
      hash_(bytes_of(kName)) {
  if (psk.size() != kKeyBytes) throw InvalidArgument("a pre-shared key has 32 bytes");
  mix_hash(prologue);
  mix_key_and_hash(psk);
}

void Noise::mix_key(ConstBytes input) {
  const Keys keys(chain_, input);
  chain_ = keys.first;
  cipher_key_ = keys.second;
}

void Noise::mix_key_and_hash(ConstBytes input) {
  const Keys keys(chain_, input);
  chain_ = keys.first;
  mix_hash(keys.second.bytes());
  cipher_key_ = keys.third;
}

void Noise::mix_public(ConstBytes key) {
  mix_hash(key);
  mix_key(key);
}

// A key encrypts one payload in the handshake, so that its nonce is always 0.
Noise::Message Noise::encrypt_and_hash(ConstBytes plain) {
  Message sealed(plain.size() + kTagBytes);
  Aead(Cipher::kAes256Gcm, cipher_key_, Direction::kSeal).seal(hash_.bytes(), plain, sealed.data());
  mix_hash(sealed);
  return sealed;
}

Noise::Message Noise::decrypt_and_hash(ConstBytes sealed) {
  Message plain(sealed.size() - kTagBytes);
  Aead aead(Cipher::kAes256Gcm, cipher_key_, Direction::kOpen);
  if (!aead.open(hash_.bytes(), sealed, plain.data()))
    throw TransportError("it has another secret, or its message was changed", kNoPeer);
  mix_hash(sealed);
  return plain;
}

void Noise::require_turn(Role of) const {
  const Role turn = turn_ == 0 ? Role::kInitiator : Role::kResponder;
  if (in_handshake() && turn != of) throw InvalidArgument("it is the other end's turn");
}

Noise::Message Noise::write(ConstBytes payload) {
  require_turn(role_);
  if (!in_handshake()) {
    Message sealed(payload.size() + kTagBytes);
    sends_->seal({}, payload, sealed.data());
    return sealed;
  }
  mix_public(own_.public_key());
  if (turn_ == 1) mix_key(own_.agree(other_.bytes()).bytes());
  Message message(own_.public_key().begin(), own_.public_key().end());
  const Message sealed = encrypt_and_hash(payload);
  message.insert(message.end(), sealed.begin(), sealed.end());
  end_turn();
  return message;
}

Noise::Message Noise::read(ConstBytes message) {
  require_turn(role_ == Role::kInitiator ? Role::kResponder : Role::kInitiator);
  if (message.size() < (in_handshake() ? kOverhead : kTagBytes))
    throw TransportError("its message is too short", kNoPeer);
  if (!in_handshake()) {
    Message plain(message.size() - kTagBytes);
    if (receives_->open({}, message, plain.data())) return plain;
    throw TransportError("its message was changed, or is not its next one", kNoPeer);
  }
  other_ = Key(message.first(kKeyBytes));
  mix_public(other_.bytes());
  if (turn_ == 1) mix_key(own_.agree(other_.bytes()).bytes());
  Message payload = decrypt_and_hash(message.subspan(kKeyBytes));
  end_turn();
  return payload;
}

// Splits after the second message (Noise, sec. 5.2).
void Noise::end_turn() {
  if (++turn_ < 2) return;
  const Keys keys(chain_, {});
  const bool initiator = role_ == Role::kInitiator;
  send_ = initiator ? keys.first : keys.second;
  receive_ = initiator ? keys.second : keys.first;
  sends_.emplace(Cipher::kAes256Gcm, send_, Direction::kSeal);
  receives_.emplace(Cipher::kAes256Gcm, receive_, Direction::kOpen);
}

// Keys of their own: those of Noise are used up by its messages after the handshake.
std::shared_ptr<Seal> Noise::seal(Cipher cipher) const {
  if (in_handshake()) throw InvalidArgument("the handshake is not over");
  const ConstBytes label = bytes_of(label_of(cipher));
  return std::make_shared<Seal>(cipher, hmac_sha256(send_.bytes(), {label}),
                                hmac_sha256(receive_.bytes(), {label}));
}

}  // namespace gradwire::crypto
