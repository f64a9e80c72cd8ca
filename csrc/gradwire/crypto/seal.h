// Seal: the two keys of one socket. It encrypts what is sent, and rejects whatever is not the other
// end's next message: bytes that were flipped, dropped, repeated or reordered. A truncated stream
// is for the caller to detect. One thread at a time may seal, and one open.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "gradwire/crypto/primitives.h"

namespace gradwire::crypto {

// The text of errors for bytes that do not open.
inline constexpr const char* kChanged =
    "bytes from it were changed, lost or added on the way (or another program talks in between)";

class Seal {
 public:
  Seal(Cipher cipher, const Key& send, const Key& receive)
      : cipher_(cipher),
        sends_(cipher, send, Direction::kSeal),
        receives_(cipher, receive, Direction::kOpen) {}

  Cipher cipher() const noexcept { return cipher_; }

  // Single messages, whose header is sent in clear: see Aead.
  void seal(ConstBytes header, ConstBytes plain, std::byte* out) {
    sends_.seal(header, plain, out);
  }
  [[nodiscard]] bool open(ConstBytes header, Bytes sealed) {
    return receives_.open(header, sealed, sealed.data());
  }

  // See Aead::prepare().
  void prepare_to_seal() noexcept { sends_.prepare(); }
  void prepare_to_open() noexcept { receives_.prepare(); }

  // A stream of bytes, as records: the length of the plain bytes in 4, little endian; the sealed
  // bytes. Returns records of all of `plain`.
  std::string records(std::string_view plain);
  // Takes the next bytes of a stream, any number of them. Returns the plain bytes of all records
  // that are complete; nullopt for bytes that do not open, and ever after.
  std::optional<std::string> opened(std::string_view arrived);
  // Returns how many bytes the next record still lacks: given no more, opened() returns at most one
  // record.
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
