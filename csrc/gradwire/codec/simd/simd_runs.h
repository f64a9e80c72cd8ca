// Masks as the lengths of their runs (codec/onebit.cc defines the codes).
#pragma once

#include "gradwire/codec/bits.h"
#include "gradwire/codec/blocks.h"

namespace gradwire::codec {
namespace {

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
