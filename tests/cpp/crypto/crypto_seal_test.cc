// Records of sealed sockets: whatever happens to their bytes on the way shows.
#include "gradwire/crypto/seal.h"

#include <gtest/gtest.h>

#include <vector>

namespace gradwire::crypto::crypto_seal_test {
namespace {

struct Ends {
  Seal one, other;

  explicit Ends(Cipher cipher = Cipher::kAes128Gcm)
      : Ends(cipher, Key(bytes_of("0123456789abcdef0123456789abcdef")),
             Key(bytes_of("fedcba9876543210fedcba9876543210"))) {}
  Ends(Cipher cipher, const Key& there, const Key& back)
      : one(cipher, there, back), other(cipher, back, there) {}
};

TEST(CryptoSeal, OpensAStreamInPiecesOfAnySize) {
  for (const std::size_t piece : {1, 3, 19, 20, 21, 4096, 100000}) {
    Ends ends;
    std::string plain, opened;
    for (const std::size_t bytes : {1, 20, 16384, 16385, 50000})
      plain += std::string(bytes, static_cast<char>('a' + bytes % 26));
    const std::string sent = ends.one.records(plain);
    EXPECT_EQ(sent.find("aaa"), std::string::npos);
    for (std::size_t at = 0; at < sent.size(); at += piece)
      opened += ends.other.opened(std::string_view(sent).substr(at, piece)).value();
    EXPECT_EQ(opened, plain);
  }
}

TEST(CryptoSeal, MissingNeverReachesBeyondARecord) {
  Ends ends;
  std::string sent = ends.one.records("first");
  sent += ends.one.records("second");
  std::vector<std::string> opened;
  for (std::size_t at = 0; at < sent.size();) {
    const std::size_t bytes = ends.other.missing();
    const std::string plain = ends.other.opened(std::string_view(sent).substr(at, bytes)).value();
    if (!plain.empty()) opened.push_back(plain);
    at += bytes;
  }
  EXPECT_EQ(opened, (std::vector<std::string>{"first", "second"}));
}

TEST(CryptoSeal, RefusesEachFlippedBit) {
  const std::string sent = Ends().one.records("some bytes");
  for (std::size_t bit = 0; bit < 8 * sent.size(); ++bit) {
    Ends ends;
    std::string changed = sent;
    changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ 1 << bit % 8);
    // A longer length waits for bytes that would have come next.
    EXPECT_FALSE(ends.other.opened(changed + std::string(kMostRecord, 'x'))) << bit;
    EXPECT_FALSE(ends.other.opened(sent)) << "it has ended";
  }
}

TEST(CryptoSeal, RefusesDroppedRepeatedAndReorderedRecords) {
  Ends ends;
  const std::string first = ends.one.records("1"), second = ends.one.records("2");
  EXPECT_FALSE(Ends().other.opened(second));
  EXPECT_FALSE(Ends().other.opened(second + first));
  EXPECT_EQ(ends.other.opened(first), "1");
  EXPECT_FALSE(ends.other.opened(first));
}

TEST(CryptoSeal, RefusesItsOwnRecordsSentBack) {
  Ends ends;
  EXPECT_FALSE(ends.one.opened(ends.one.records("hello")));
}

TEST(CryptoSecret, IsWipedAtItsEnd) {
  alignas(Key) std::byte memory[sizeof(Key)];
  const Key* key = new (memory) Key(bytes_of("0123456789abcdef0123456789abcdef"));
  EXPECT_EQ(memory[0], std::byte{'0'});
  key->~Key();
  for (const std::byte each : memory) EXPECT_EQ(each, std::byte{0});
}

TEST(CryptoSeal, CoversTheHeaderOfAMessage) {
  for (const bool changed : {false, true}) {
    Ends ends;
    std::string message(5 + kTagBytes, '\0');
    const Bytes bytes = std::as_writable_bytes(std::span(message));
    ends.one.seal(bytes_of("header"), bytes_of("plain"), bytes.data());
    EXPECT_EQ(ends.other.open(bytes_of(changed ? "Header" : "header"), bytes), !changed);
    EXPECT_TRUE(changed || message.starts_with("plain"));
  }
}

TEST(CryptoSeal, BothEndsTakeTheNextKeyAfterAMillionMessages) {
  Ends ends;
  std::string message(kTagBytes, '\0');
  const Bytes bytes = std::as_writable_bytes(std::span(message));
  for (int i = 0; i < (1 << 20) + 2; ++i) {
    if (i % 3 == 0) ends.one.prepare_to_seal();
    if (i % 5 == 0) ends.other.prepare_to_open();
    ends.one.seal({}, {}, bytes.data());
    ASSERT_TRUE(ends.other.open({}, bytes)) << i;
  }
}

TEST(CryptoSeal, PreparingChangesNoBytes) {
  for (const Cipher cipher : {Cipher::kAes128Gcm, Cipher::kChaCha20Poly1305}) {
    Ends plain(cipher), prepared(cipher);
    for (const char* text : {"first", "second", "third"}) {
      prepared.one.prepare_to_seal();
      prepared.one.prepare_to_seal();
      EXPECT_EQ(prepared.one.records(text), plain.one.records(text));
    }
  }
}

}  // namespace
}  // namespace gradwire::crypto::crypto_seal_test
