// lossless: the blocks that codec/lossless.cc defines. Plain loops over bytes and words, of which
// the compiler makes vectors; bits are moved eight at a time, in one word.
#pragma once

#include "gradwire/codec/blocks.h"
#include "gradwire/codec/simd/simd_group.h"

namespace gradwire::codec {
namespace {
namespace lossless {

constexpr std::size_t kBlock = LosslessKernels::kBlock;
constexpr unsigned kPlain = LosslessKernels::kPlain;
constexpr std::uint64_t kOnes = 0x0101010101010101;  // the lowest bit of each byte

constexpr std::size_t bytes_of_bits(std::size_t n) { return (n + 7) / 8; }

// Returns the lowest bits of eight bytes, that of the first lowest.
std::uint8_t gather_bits(std::uint64_t eight) {
  return static_cast<std::uint8_t>(((eight & kOnes) * 0x0102040810204080) >> 56);
}
// Returns eight bytes of 0 or 1.
std::uint64_t spread_bits(std::uint8_t byte) {
  const std::uint64_t own = (byte * kOnes) & 0x8040201008040201;
  return ((own + 0x7F7F7F7F7F7F7F7F) >> 7) & kOnes;
}

// The elements of a block, exponents apart from signs and mantissas. A short block is padded with
// its first element.
template <typename Word>
struct Block {
  static constexpr unsigned kBits = 8 * sizeof(Word), kTop = kBits - 8;
  static constexpr unsigned kLow = sizeof(Word) - 1;  // bytes behind the exponent
  // Of a float as it is: the sign, and the mantissa (of float16 but its top).
  static constexpr Word kSign = static_cast<Word>(Word{1} << (kBits - 1));
  static constexpr Word kMantissa = static_cast<Word>((Word{1} << (kTop - 1)) - 1);

  alignas(64) Word words[kBlock];
  alignas(64) std::uint8_t exponents[kBlock];

  void load(const std::byte* x, std::size_t n) {
    __builtin_memcpy(words, x, n * sizeof(Word));
    for (std::size_t i = n; i < kBlock; ++i) words[i] = words[0];
    for (std::size_t i = 0; i < kBlock; ++i)
      exponents[i] = static_cast<std::uint8_t>(words[i] >> (kTop - 1));
    for (std::size_t i = 0; i < kBlock; ++i)
      words[i] = static_cast<Word>((words[i] & kSign) >> 8 | (words[i] & kMantissa));
  }
  void store(std::byte* y, std::size_t n) {
    for (std::size_t i = 0; i < kBlock; ++i) {
      const auto exponent = static_cast<Word>(static_cast<Word>(exponents[i]) << (kTop - 1));
      words[i] = static_cast<Word>((words[i] << 8 & kSign) | exponent | (words[i] & kMantissa));
    }
    __builtin_memcpy(y, words, n * sizeof(Word));
  }
  // Returns a bit for each of the low bytes that is 0 in all elements.
  unsigned zero_bytes() const {
    Word any = 0;
    for (std::size_t i = 0; i < kBlock; ++i) any = static_cast<Word>(any | words[i]);
    unsigned zero = 0;
    for (unsigned k = 0; k < kLow; ++k) zero |= ((any >> (8 * k) & 0xFF) == 0 ? 1U : 0U) << k;
    return zero;
  }
  void read_byte(unsigned k, std::byte* out, std::size_t n) const {
    alignas(64) std::uint8_t plane[kBlock];
    for (std::size_t i = 0; i < kBlock; ++i)
      plane[i] = static_cast<std::uint8_t>(words[i] >> (8 * k));
    __builtin_memcpy(out, plane, n);
  }
  void write_byte(unsigned k, const std::byte* in, std::size_t n) {
    alignas(64) std::uint8_t plane[kBlock] = {};
    __builtin_memcpy(plane, in, n);
    for (std::size_t i = 0; i < kBlock; ++i)
      words[i] = static_cast<Word>(words[i] | static_cast<Word>(plane[i]) << (8 * k));
  }
};

// The bits of a block's offsets, one plane for each, as they were when they were read.
struct Planes {
  std::uint8_t of[kPlain - 1][kBlock / 8] = {};
  unsigned width = 0;

  void gather(const std::uint8_t* codes, unsigned bit) {
    const auto* const bytes = reinterpret_cast<const std::byte*>(codes);
    for (std::size_t g = 0; g < kBlock / 8; ++g)
      of[bit][g] = gather_bits(get<std::uint64_t>(bytes + 8 * g) >> bit);
  }
  void read(const std::byte* in, std::size_t n) {
    for (unsigned bit = 0; bit < width; ++bit)
      __builtin_memcpy(of[bit], in + bit * bytes_of_bits(n), bytes_of_bits(n));
  }
  void subtract_from(std::uint8_t largest, std::uint8_t* exponents) const {
    for (std::size_t g = 0; g < kBlock / 8; ++g) {
      std::uint64_t eight = 0;
      for (unsigned bit = 0; bit < width; ++bit) eight |= spread_bits(of[bit][g]) << bit;
      __builtin_memcpy(exponents + 8 * g, &eight, sizeof eight);
    }
    for (std::size_t i = 0; i < kBlock; ++i)
      exponents[i] = static_cast<std::uint8_t>(largest - exponents[i]);
  }
  // Returns a bit for each of 64 elements, set where all its bits are; none from element n on.
  std::uint64_t escaped(std::size_t first, std::size_t n) const {
    if (width == 0 || first >= n) return 0;
    std::uint64_t all = ~std::uint64_t{0};
    if (n - first < 64) all = (std::uint64_t{1} << (n - first)) - 1;
    for (unsigned bit = 0; bit < width; ++bit)
      all &= get<std::uint64_t>(reinterpret_cast<const std::byte*>(of[bit] + first / 8));
    return all;
  }
};

// How far each exponent is below the largest, and the bits in which that is written.
struct Offsets {
  alignas(64) std::uint8_t below[kBlock];
  std::uint8_t largest = 0;
  unsigned width = kPlain;

  void take(const std::uint8_t* exponents, std::size_t n) {
    for (std::size_t i = 0; i < kBlock; ++i)
      largest = exponents[i] > largest ? exponents[i] : largest;
    for (std::size_t i = 0; i < kBlock; ++i)
      below[i] = static_cast<std::uint8_t>(largest - exponents[i]);
    for (std::size_t i = n; i < kBlock; ++i) below[i] = 0;
    choose(n);
  }
  // Takes the width of the fewest bytes, the smallest of those; kPlain if none saves any.
  void choose(std::size_t n) {
    std::size_t least = n - 1;  // bytes; one is for `largest`
    for (unsigned bits = kPlain - 1; bits > 0; --bits) {
      const std::size_t bytes = bits * bytes_of_bits(n) + reach((1U << bits) - 1);
      if (bytes <= least) least = bytes, width = bits;
    }
    if (reach(1) == 0) width = 0;
  }
  std::size_t reach(unsigned bound) const {
    std::uint8_t count = 0;  // at most kBlock
    for (std::size_t i = 0; i < kBlock; ++i)
      count = static_cast<std::uint8_t>(count + (below[i] >= bound));
    return count;
  }
  // Writes one bit of each, for every bit, and then the exponents that are too far below, of which
  // all bits are set.
  std::byte* write(const std::uint8_t* exponents, std::size_t n, std::byte* out) const {
    const auto escape = static_cast<std::uint8_t>((1U << width) - 1);
    alignas(64) std::uint8_t codes[kBlock];
    for (std::size_t i = 0; i < kBlock; ++i) codes[i] = below[i] < escape ? below[i] : escape;
    Planes planes;
    planes.width = width;
    for (unsigned bit = 0; bit < width; ++bit) {
      planes.gather(codes, bit);
      __builtin_memcpy(out, planes.of[bit], bytes_of_bits(n));
      out += bytes_of_bits(n);
    }
    for (std::size_t first = 0; first < kBlock; first += 64)
      for (std::uint64_t left = planes.escaped(first, n); left != 0; left &= left - 1)
        *out++ = static_cast<std::byte>(
            exponents[first + static_cast<std::size_t>(__builtin_ctzll(left))]);
    return out;
  }
};

template <typename Word>
std::byte* pack_block(const std::byte* x, std::size_t n, std::byte* out) {
  Block<Word> block;
  block.load(x, n);
  Offsets offsets;
  offsets.take(block.exponents, n);
  const unsigned zero = block.zero_bytes();
  *out++ = static_cast<std::byte>(offsets.width | zero << 4);
  if (offsets.width == kPlain) {
    __builtin_memcpy(out, block.exponents, n);
    out += n;
  } else {
    *out++ = static_cast<std::byte>(offsets.largest);
    out = offsets.write(block.exponents, n, out);
  }
  for (unsigned k = 0; k < Block<Word>::kLow; ++k) {
    if ((zero >> k & 1U) != 0) continue;
    block.read_byte(k, out, n);
    out += n;
  }
  return out;
}

template <typename Word>
std::size_t pack(const std::byte* x, std::size_t n, std::byte* out, std::size_t room) noexcept {
  const std::byte* const begin = out;
  const std::byte* const end = out + room;
  while (n > 0) {
    const std::size_t count = n < kBlock ? n : kBlock;
    if (static_cast<std::size_t>(end - out) < 1 + count * sizeof(Word)) return 0;
    out = pack_block<Word>(x, count, out);
    x += count * sizeof(Word);
    n -= count;
  }
  return static_cast<std::size_t>(out - begin);
}

// Payload that is read; it is not trusted.
struct Rest {
  const std::byte* at;
  std::size_t size;

  // Returns the next bytes; null if there are not so many.
  const std::byte* take(std::size_t bytes) {
    if (size < bytes) return nullptr;
    const std::byte* const taken = at;
    at += bytes;
    size -= bytes;
    return taken;
  }
};

// Returns whether the payload has all that it says.
bool read_exponents(Rest& rest, unsigned width, std::size_t n, std::uint8_t* exponents) {
  const std::byte* const plain = rest.take(width == kPlain ? n : 1);
  if (plain == nullptr) return false;
  if (width == kPlain) {
    __builtin_memcpy(exponents, plain, n);
    return true;
  }
  Planes planes;
  planes.width = width;
  const std::byte* const bits = rest.take(width * bytes_of_bits(n));
  if (bits == nullptr) return false;
  planes.read(bits, n);
  planes.subtract_from(static_cast<std::uint8_t>(*plain), exponents);
  for (std::size_t first = 0; first < kBlock; first += 64)
    for (std::uint64_t left = planes.escaped(first, n); left != 0; left &= left - 1) {
      const std::byte* const own = rest.take(1);
      if (own == nullptr) return false;
      exponents[first + static_cast<std::size_t>(__builtin_ctzll(left))] =
          static_cast<std::uint8_t>(*own);
    }
  return true;
}

template <typename Word>
bool unpack_block(Rest& rest, std::byte* y, std::size_t n) {
  using Words = Block<Word>;
  const std::byte* const head = rest.take(1);
  if (head == nullptr) return false;
  const auto first = static_cast<unsigned>(*head);
  const unsigned width = first & 0xF, zero = first >> 4;
  if (width > kPlain || zero >> Words::kLow != 0) return false;
  Words block;
  if (!read_exponents(rest, width, n, block.exponents)) return false;
  for (std::size_t i = 0; i < kBlock; ++i) block.words[i] = 0;
  for (unsigned k = 0; k < Words::kLow; ++k) {
    if ((zero >> k & 1U) != 0) continue;
    const std::byte* const low = rest.take(n);
    if (low == nullptr) return false;
    block.write_byte(k, low, n);
  }
  block.store(y, n);
  return true;
}

template <typename Word>
std::size_t unpack(const std::byte* in, std::size_t size, std::byte* y, std::size_t n) noexcept {
  Rest rest{in, size};
  while (n > 0) {
    const std::size_t count = n < kBlock ? n : kBlock;
    if (!unpack_block<Word>(rest, y, count)) return 0;
    y += count * sizeof(Word);
    n -= count;
  }
  return size - rest.size;
}

constexpr LosslessKernels kKernels = {{pack<std::uint16_t>, unpack<std::uint16_t>},
                                      {pack<std::uint32_t>, unpack<std::uint32_t>}};

}  // namespace lossless
}  // namespace
}  // namespace gradwire::codec
