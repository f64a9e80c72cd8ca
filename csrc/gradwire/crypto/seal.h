// Seal: the two keys of one socket. What is sent over it is encrypted, and what arrives is shown
// only if it is what the other end has sealed, in the same order. So bytes that were flipped,
// dropped, repeated or reordered on the way are found out; the end of a stream is the caller's.
//
// One thread at a time seals, and one opens.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "gradwire/crypto/primitives.h"

namespace gradwire::crypto {

// What errors say of bytes that do not open.
inline constexpr const char* kChanged =
    "bytes from it were changed, lost or added on the way (or another program talks in between)";

class Seal {
 public:
  Seal(Cipher cipher, const Key& send, const Key& receive)
      : cipher_(cipher),
        sends_(cipher, send, Direction::kSeal),
        receives_(cipher, receive, Direction::kOpen) {}

  Cipher cipher() const noexcept { return cipher_; }

  // Single messages, whose header travels in clear: see Aead.
  void seal(ConstBytes header, ConstBytes plain, std::byte* out) {
    sends_.seal(header, plain, out);
  }
  [[nodiscard]] bool open(ConstBytes header, Bytes sealed) {
    return receives_.open(header, sealed, sealed.data());
  }

  // Does beforehand what seal() or open() of the next message can do without it.
  void prepare_to_seal() noexcept { sends_.prepare(); }
  void prepare_to_open() noexcept { receives_.prepare(); }

  // A stream of bytes, as records: the length of the plain bytes in 4, little endian; the sealed
  // bytes. Returns records of all of `plain`.
  std::string records(std::string_view plain);
  // Takes what has arrived of a stream, in pieces of any size. Returns what is complete of it;
  // nullopt for bytes that do not open, and from then on.
  std::optional<std::string> opened(std::string_view arrived);
  // Returns how many bytes are missing of the record that arrives: with no more, opened() returns
  // at most one.
  std::size_t missing() const noexcept;

 private:
  void open_record(std::string& plain);

  Cipher cipher_;
  Aead sends_, receives_;
  std::string partial_;  // of a record
  bool broken_ = false;
};

inline constexpr std::size_t kRecordHeader = 4;
inline constexpr std::size_t kMostRecord = 1 << 14;  // plain bytes
inline constexpr std::size_t kRecordExtra = kRecordHeader + kTagBytes;

}  // namespace gradwire::crypto
