// The handshake against published vectors (cacophony's, for Noise_NNpsk0_25519_AESGCM_SHA256).
#include "gradwire/crypto/noise.h"

#include <gtest/gtest.h>

#include <string>

#include "gradwire/base/error.h"

namespace gradwire::crypto::crypto_noise_test {
namespace {

using Message = Noise::Message;

Message unhex(std::string_view text) {
  Message bytes;
  for (std::size_t i = 0; i < text.size(); i += 2)
    bytes.push_back(static_cast<std::byte>(std::stoi(std::string(text.substr(i, 2)), nullptr, 16)));
  return bytes;
}

const Message kPrologue = unhex("4a6f686e2047616c74");
const Message kPsk = unhex("54686973206973206d7920417573747269616e20706572737065637469766521");

Noise vector_end(Role role) {
  const char* key = role == Role::kInitiator
                        ? "893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a"
                        : "bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b";
  return {role, kPrologue, kPsk, KeyPair(Key(unhex(key)))};
}

struct Turn {
  const char *payload, *message;
};
constexpr Turn kTurns[] = {
    {"4c756477696720766f6e204d69736573",
     "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c7944"
     "7c37a89fc17813788d30df2d59501d6066f5f8aecc3406bbd9829f2d24a531b1"},
    {"4d757272617920526f746862617264",
     "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843"
     "2f29d79368ef9de4e1ae7a362fb05bf0ad668e026bf5714554497b3a720461"},
    {"462e20412e20486179656b", "7c01e898a6201f36aecee532e29cd0b7f8ffa29d3366ad0dce39a6"},
    {"4361726c204d656e676572", "a9ff535aace3db6a1da1a7fb00fe2de2622bb373abad9fb42c00e0"},
    {"4a65616e2d426170746973746520536179",
     "6cfc49a3e65472edc2d0152abe5ce950170a8a47c959f30bd48b5f0aacf29adbfd"},
    {"457567656e2042f6686d20766f6e2042617765726b",
     "9bc86e6d974ed21ba04604a94aa68de21677eb409ead070c0cd569b069ee19ba142aa4c1a9"},
};

TEST(CryptoNoise, WritesAndReadsThePublishedMessages) {
  Noise initiator = vector_end(Role::kInitiator), responder = vector_end(Role::kResponder);
  Noise *from = &initiator, *to = &responder;
  for (const Turn& turn : kTurns) {
    const Message message = from->write(unhex(turn.payload));
    EXPECT_EQ(message, unhex(turn.message));
    EXPECT_EQ(to->read(message), unhex(turn.payload));
    std::swap(from, to);
  }
  const Message hash = unhex("9f3b1f9afd7767767b5b9d1069844a6154fdbdcc36dfb3e31c0fffc5c973d530");
  EXPECT_TRUE(std::ranges::equal(initiator.hash(), hash));
  EXPECT_TRUE(std::ranges::equal(responder.hash(), hash));
}

TEST(CryptoNoise, RefusesAnotherSecretAndAnotherPrologue) {
  Message other = kPsk;
  other[31] ^= std::byte{1};
  EXPECT_THROW(
      Noise(Role::kResponder, kPrologue, other).read(vector_end(Role::kInitiator).write({})),
      TransportError);
  EXPECT_THROW(Noise(Role::kResponder, {}, kPsk).read(vector_end(Role::kInitiator).write({})),
               TransportError);
}

TEST(CryptoNoise, RefusesEachFlippedBitOfItsMessages) {
  const Message first = unhex(kTurns[0].message), second = unhex(kTurns[1].message);
  for (std::size_t bit = 0; bit < 8 * first.size(); ++bit) {
    Message changed = first;
    changed[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    EXPECT_THROW(vector_end(Role::kResponder).read(changed), TransportError) << bit;
  }
  for (std::size_t bit = 0; bit < 8 * second.size(); ++bit) {
    Message changed = second;
    changed[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    Noise initiator = vector_end(Role::kInitiator);
    initiator.write(unhex(kTurns[0].payload));
    EXPECT_THROW(initiator.read(changed), TransportError) << bit;
  }
}

TEST(CryptoNoise, RefusesAPublicKeyWithWhichAllAgreeAlike) {
  Noise initiator = vector_end(Role::kInitiator);
  initiator.write({});
  EXPECT_THROW(initiator.read(Message(Noise::kOverhead)), TransportError);
}

TEST(CryptoNoise, RefusesShortMessages) {
  for (std::size_t bytes = 0; bytes < Noise::kOverhead; ++bytes)
    EXPECT_THROW(vector_end(Role::kResponder).read(Message(bytes)), TransportError);
}

TEST(CryptoNoise, GivesBothEndsTheSameKeys) {
  Noise initiator(Role::kInitiator, kPrologue, kPsk), responder(Role::kResponder, kPrologue, kPsk);
  responder.read(initiator.write({}));
  initiator.read(responder.write({}));
  for (const Cipher cipher : {Cipher::kAes128Gcm, Cipher::kAes256Gcm, Cipher::kChaCha20Poly1305}) {
    const auto one = initiator.seal(cipher), other = responder.seal(cipher);
    EXPECT_EQ(other->opened(one->records("to the responder")), "to the responder");
    EXPECT_EQ(one->opened(other->records("to the initiator")), "to the initiator");
  }
}

}  // namespace
}  // namespace gradwire::crypto::crypto_noise_test
