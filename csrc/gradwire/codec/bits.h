// Strings of bits, the first in the lowest bit of the first byte.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradwire::codec {
namespace {  // one copy for each instruction set, as all of simd_lanes.h

// Writes bits from the beginning, in whole bytes and none beyond the end.
class BitWriter {
 public:
  explicit BitWriter(std::byte* to) : to_(to) {}

  void write(std::uint32_t bits, std::uint32_t count) {  // the other bits must be 0
    pending_ |= std::uint64_t{bits} << held_;
    held_ += count;
    if (held_ < 32) return;
    __builtin_memcpy(to_, &pending_, 4);
    to_ += 4;
    pending_ >>= 32;
    held_ -= 32;
  }
  std::byte* finish() {
    const std::uint32_t bytes = (held_ + 7) / 8;
    __builtin_memcpy(to_, &pending_, bytes);
    return to_ + bytes;
  }

 private:
  std::byte* to_;
  std::uint64_t pending_ = 0;
  std::uint32_t held_ = 0;
};

// Reads untrusted bits, and zeros behind the last.
class BitReader {
 public:
  BitReader(const std::byte* from, std::size_t bytes) : from_(from), left_(bytes) {}

  // Returns the next bits, at least 32.
  std::uint64_t peek() {
    if (held_ >= 32) return bits_;
    if (left_ >= 4) {
      std::uint32_t next;
      __builtin_memcpy(&next, from_, sizeof next);
      take(next, 4);
    }
    while (held_ < 32 && left_ > 0) take(static_cast<std::uint32_t>(*from_), 1);
    return bits_;
  }
  // Skips bits. Returns whether there were so many.
  bool skip(std::uint32_t count) {
    if (count > held_) return false;
    bits_ >>= count;
    held_ -= count;
    read_ += count;
    return true;
  }
  std::size_t bytes_read() const { return (read_ + 7) / 8; }

 private:
  void take(std::uint32_t next, std::uint32_t bytes) {
    bits_ |= std::uint64_t{next} << held_;
    held_ += 8 * bytes;
    from_ += bytes;
    left_ -= bytes;
  }

  const std::byte* from_;
  std::size_t left_;
  std::uint64_t bits_ = 0;
  std::uint32_t held_ = 0;
  std::size_t read_ = 0;
};

}  // namespace
}  // namespace gradwire::codec
