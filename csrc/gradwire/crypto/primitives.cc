#include "gradwire/crypto/primitives.h"

#include <utility>
#include <vector>

#include "gradwire/base/error.h"

namespace gradwire::crypto {
namespace {

constexpr int kX25519 = 1034;  // NID_X25519
constexpr int kGetTag = 0x10;  // EVP_CTRL_AEAD_GET_TAG
constexpr int kSetTag = 0x11;
constexpr int kAsBefore = -1;  // encrypt or decrypt
constexpr std::size_t kNonceBytes = 12;
constexpr std::uint64_t kMessagesPerKey = 1 << 20;

const unsigned char* raw(ConstBytes bytes) {
  return reinterpret_cast<const unsigned char*>(bytes.data());
}
unsigned char* raw(std::byte* bytes) { return reinterpret_cast<unsigned char*>(bytes); }

void require(bool done, const char* what) {
  if (done) return;
  libcrypto().clear_errors();
  throw Error(str_cat("libcrypto failed: ", what));
}

// Never moves what it has: that would leave a copy of keys in memory which nobody wipes.
std::vector<std::byte> joined(std::initializer_list<ConstBytes> parts) {
  std::size_t bytes = 0;
  for (const ConstBytes part : parts) bytes += part.size();
  std::vector<std::byte> all;
  all.reserve(bytes);
  for (const ConstBytes part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

const CipherKind* kind_of(Cipher cipher) {
  const Libcrypto& library = libcrypto();
  switch (cipher) {
    case Cipher::kAes128Gcm:
      return library.aes_128_gcm();
    case Cipher::kAes256Gcm:
      return library.aes_256_gcm();
    case Cipher::kChaCha20Poly1305:
      return library.chacha20_poly1305();
  }
  return nullptr;
}

// As in Noise: 32 bits of zeros, then the counter, little endian for ChaChaPoly (sec. 12).
std::array<std::byte, kNonceBytes> nonce_of(Cipher cipher, std::uint64_t count) {
  std::array<std::byte, kNonceBytes> nonce{};
  for (std::size_t i = 0; i < sizeof count; ++i) {
    const std::size_t at = cipher == Cipher::kChaCha20Poly1305 ? 4 + i : kNonceBytes - 1 - i;
    nonce[at] = static_cast<std::byte>(count >> 8 * i);
  }
  return nonce;
}

}  // namespace

void fill_random(Bytes out) {
  require(libcrypto().random(raw(out.data()), static_cast<int>(out.size())) == 1, "random bytes");
}

Key sha256(std::initializer_list<ConstBytes> parts) {
  const Libcrypto& library = libcrypto();
  const std::vector<std::byte> all = joined(parts);
  Key out;
  require(library.digest(all.data(), all.size(), raw(out.data()), nullptr, library.sha256(),
                         nullptr) == 1,
          "SHA-256");
  return out;
}

Key hmac_sha256(ConstBytes key, std::initializer_list<ConstBytes> parts) {
  const Libcrypto& library = libcrypto();
  std::vector<std::byte> all = joined(parts);
  Key out;
  const bool done =
      library.hmac(library.sha256(), key.data(), static_cast<int>(key.size()), raw(ConstBytes(all)),
                   all.size(), raw(out.data()), nullptr) != nullptr;
  wipe(all);
  require(done, "HMAC");
  return out;
}

KeyPair::KeyPair()
    : KeyPair([] {
        Key random;
        fill_random({random.data(), kKeyBytes});
        return random;
      }()) {}

KeyPair::KeyPair(const Key& private_key)
    : key_(libcrypto().private_key(kX25519, nullptr, raw(private_key.bytes()), kKeyBytes)) {
  std::size_t bytes = kKeyBytes;
  require(key_ && libcrypto().public_bytes(key_.get(), raw(public_.data()), &bytes) == 1, "X25519");
}

Key KeyPair::agree(ConstBytes other) const {
  const Libcrypto& library = libcrypto();
  const std::unique_ptr<PublicKey, Free> theirs(
      library.public_key(kX25519, nullptr, raw(other), other.size()));
  const std::unique_ptr<PublicKeyContext, Free> context(
      library.key_context_new(key_.get(), nullptr));
  Key shared;
  std::size_t bytes = kKeyBytes;
  const bool done = theirs && context && library.derive_init(context.get()) == 1 &&
                    library.derive_set_peer(context.get(), theirs.get()) == 1 &&
                    library.derive(context.get(), raw(shared.data()), &bytes) == 1;
  if (done) return shared;
  library.clear_errors();
  throw TransportError("it sent no public key", kNoPeer);
}

Aead::Aead(Cipher cipher, const Key& key, Direction direction)
    : cipher_(cipher),
      key_(key),
      direction_(direction),
      context_(libcrypto().cipher_context_new()) {
  set_key();
}

void Aead::set_key() {
  const int encrypt = static_cast<int>(direction_);
  require(context_ && libcrypto().cipher_init(context_.get(), kind_of(cipher_), nullptr,
                                              raw(key_.bytes()), nullptr, encrypt) == 1,
          "a cipher's key");
}

bool Aead::set_nonce() noexcept {
  const auto nonce = nonce_of(cipher_, count_);
  return libcrypto().cipher_init(context_.get(), nullptr, nullptr, nullptr, raw(ConstBytes(nonce)),
                                 kAsBefore) == 1;
}

void Aead::prepare() noexcept {
  const bool needs_key = count_ % kMessagesPerKey == 0;  // which the message itself sets
  if (!prepared_ && !needs_key) prepared_ = set_nonce();
}

void Aead::next_nonce() {
  if (count_ > 0 && count_ % kMessagesPerKey == 0) {
    key_ = hmac_sha256(key_.bytes(), {bytes_of("gradwire/2 next key")});
    set_key();
  }
  require(std::exchange(prepared_, false) || set_nonce(), "a nonce");
  ++count_;
}

bool Aead::run(ConstBytes associated, ConstBytes in, std::byte* out) {
  const Libcrypto& library = libcrypto();
  int written = 0;
  if (!associated.empty() &&
      library.cipher_update(context_.get(), nullptr, &written, raw(associated),
                            static_cast<int>(associated.size())) != 1)
    return false;
  if (!in.empty() && library.cipher_update(context_.get(), raw(out), &written, raw(in),
                                           static_cast<int>(in.size())) != 1)
    return false;
  return library.cipher_final(context_.get(), raw(out + in.size()), &written) == 1;
}

void Aead::seal(ConstBytes associated, ConstBytes plain, std::byte* out) {
  next_nonce();
  require(run(associated, plain, out) &&
              libcrypto().cipher_context_ctrl(context_.get(), kGetTag, kTagBytes,
                                              out + plain.size()) == 1,
          "encryption");
}

bool Aead::open(ConstBytes associated, ConstBytes sealed, std::byte* out) {
  if (sealed.size() < kTagBytes) return false;
  next_nonce();
  const std::size_t plain = sealed.size() - kTagBytes;
  std::array<std::byte, kTagBytes> tag{};
  std::copy_n(sealed.begin() + static_cast<std::ptrdiff_t>(plain), kTagBytes, tag.begin());
  const bool genuine =
      libcrypto().cipher_context_ctrl(context_.get(), kSetTag, kTagBytes, tag.data()) == 1 &&
      run(associated, sealed.first(plain), out);
  if (!genuine) libcrypto().clear_errors();
  return genuine;
}

}  // namespace gradwire::crypto
