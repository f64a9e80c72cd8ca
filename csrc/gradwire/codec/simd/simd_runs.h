// Strings of bits, and masks as the lengths of their runs (codec/onebit.cc defines the codes).
#pragma once

#include "gradwire/codec/blocks.h"

namespace gradwire::codec {
namespace {

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

constexpr std::size_t most_run_bytes(std::size_t n) { return OneBitKernels::bytes_of_bits(n) - 1; }

std::uint32_t high_bit(std::uint32_t x) {
  return 31U - static_cast<std::uint32_t>(__builtin_clz(x));
}

// Returns the bits that differ from the bit before them, among up to 64 from the i-th on.
std::uint64_t changes_in(const std::byte* mask, std::size_t i, std::size_t n,
                         std::uint64_t& before) {
  const std::size_t count = n - i < 64 ? n - i : 64;
  std::uint64_t word = 0;
  __builtin_memcpy(&word, mask + i / 8, OneBitKernels::bytes_of_bits(count));
  const std::uint64_t changes = word ^ (word << 1 | before);
  before = word >> 63;
  return changes & (~std::uint64_t{0} >> (64 - count));
}

// Writes the mask as runs. Returns the bytes written, most_run_bytes(n) or less; 0 where more are
// needed.
std::size_t write_runs(const std::byte* mask, std::size_t n, std::byte* out) {
  BitWriter writer(out);
  std::size_t room = 8 * most_run_bytes(n), begin = ~std::size_t{0};
  const auto end_run = [&](std::size_t end) {
    const auto length = static_cast<std::uint32_t>(end - begin);
    const std::uint32_t digits = high_bit(length), size = 2 * digits + 1;
    if (size > room) return false;
    room -= size;
    begin = end;
    writer.write((length << 1 | 1) << digits & ((2U << 2 * digits) - 1), size);
    return true;
  };
  std::uint64_t before = 0;
  for (std::size_t i = 0; i < n; i += 64)
    for (std::uint64_t left = changes_in(mask, i, n, before); left != 0; left &= left - 1)
      if (!end_run(i + static_cast<std::size_t>(__builtin_ctzll(left)))) return 0;
  if (!end_run(n)) return 0;
  return static_cast<std::size_t>(writer.finish() - out);
}

void write_same(BitWriter& writer, bool set, std::size_t count) {
  const std::uint32_t bits = set ? ~0U : 0U;
  for (; count > 32; count -= 32) writer.write(bits, 32);
  if (count > 0) writer.write(bits >> (32 - count), static_cast<std::uint32_t>(count));
}

// Reads a run's length; returns 0 where there is none.
std::size_t read_run(BitReader& reader) {
  const std::uint64_t bits = reader.peek();
  const auto zeros = static_cast<std::uint32_t>(__builtin_ctzll(bits | std::uint64_t{1} << 15));
  if (zeros == 15 || !reader.skip(2 * zeros + 1)) return 0;
  const std::uint64_t rest = bits >> (zeros + 1) & ((std::uint64_t{1} << zeros) - 1);
  return std::size_t{1} << zeros | rest;
}

std::size_t read_runs(const std::byte* in, std::size_t available, std::size_t n,
                      std::byte* mask) noexcept {
  BitReader reader(in, available < most_run_bytes(n) ? available : most_run_bytes(n));
  BitWriter writer(mask);
  std::size_t left = n + 1;
  for (bool set = false; left > 0; set = !set) {
    const std::size_t length = read_run(reader);
    if (length == 0 || length > left) return 0;
    write_same(writer, set, left > n ? length - 1 : length);
    left -= length;
  }
  writer.finish();
  return reader.bytes_read();
}

}  // namespace
}  // namespace gradwire::codec
