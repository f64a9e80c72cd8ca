#include "gradwire/codec/lossless.h"

#include <gtest/gtest.h>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "codec_reference.h"
#include "gradwire/base/error.h"
#include "gradwire/codec/simd/simd.h"

namespace gradwire::codec {
namespace codec_lossless_test {

using Memory = std::vector<std::byte>;

constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr std::size_t kBlock = LosslessKernels::kBlock;

std::vector<std::size_t> lengths() {
  return {1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 255, 1024, 5003};
}

LosslessKernels::OfWords of(const Kernels& table, DType dtype) {
  return size_of(dtype) == 2 ? table.lossless.two : table.lossless.four;
}

// Values of a normal distribution, whose sizes change every 200 elements.
Memory gradients(DType dtype, std::size_t n) {
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal;
  Memory all(n * size_of(dtype));
  for (std::size_t i = 0; i < n; ++i) {
    const float value = normal(random) * std::ldexp(1.0F, -static_cast<int>(i / 200 % 12));
    std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
    if (dtype == DType::kBFloat16) bits >>= 16;
    std::memcpy(all.data() + i * size_of(dtype), &bits, size_of(dtype));
  }
  return all;
}

// Floats whose last two bytes are 0, as those that a bfloat16 became.
Memory widened(std::size_t n) {
  Memory all = gradients(DType::kFloat32, n);
  for (std::size_t i = 0; i < n; ++i) std::memset(all.data() + 4 * i, 0, 2);
  return all;
}

Memory unpacked(ConstBytes packed) {
  Memory plain(unpacked_bytes(packed));
  unpack(packed, plain);
  return plain;
}

void expect_exact(const Memory& plain, DType dtype) {
  const std::size_t n = plain.size() / size_of(dtype);
  Memory expected;
  for (const Kernels* table : available_kernels()) {
    Memory out(1 + plain.size() + n / kBlock + 1), back(plain.size() + 2, std::byte{7});
    const std::size_t room = plain.size() + (n + kBlock - 1) / kBlock;
    const std::size_t size = of(*table, dtype).pack(plain.data(), n, out.data() + 1, room);
    ASSERT_GT(size, 0U);
    ASSERT_LE(size, room);
    const Memory packed(out.begin() + 1, out.begin() + 1 + static_cast<std::ptrdiff_t>(size));
    if (expected.empty()) expected = packed;
    ASSERT_EQ(packed, expected) << table->name;
    ASSERT_EQ(of(*table, dtype).unpack(packed.data(), size, back.data() + 1, n), size);
    ASSERT_EQ(Memory(back.begin() + 1, back.end() - 1), plain) << table->name;
    ASSERT_TRUE(back.front() == std::byte{7} && back.back() == std::byte{7});
  }
}

TEST(Lossless, KeepsEveryBitOnEveryInstructionSet) {
  std::mt19937_64 random(1);
  for (const DType dtype : kTypes)
    for (const Data data : kAllData)
      for (const std::size_t n : lengths()) {
        SCOPED_TRACE(std::string(name_of(dtype)) + ", n=" + std::to_string(n));
        expect_exact(draw_elements(dtype, n, data, random), dtype);
      }
  for (const std::size_t n : lengths()) expect_exact(widened(n), DType::kFloat32);
}

TEST(Lossless, KeepsNansZerosAndDenormals) {
  const std::vector<std::uint32_t> odd = {0x7FC00000, 0xFFC00001, 0x7F800001, 0xFF812345,
                                          0x7F800000, 0xFF800000, 0x80000000, 0,
                                          1,          0x80000001, 0x807FFFFF, 0x00400000};
  Memory plain(gradients(DType::kFloat32, 1000));
  for (std::size_t i = 0; i < odd.size(); ++i) std::memcpy(plain.data() + 44 * i, &odd[i], 4);
  Memory packed(plain.size());
  packed.resize(pack(DType::kFloat32, plain, packed));
  ASSERT_GT(packed.size(), 0U);
  EXPECT_EQ(unpacked(packed), plain);
}

double ratio(DType dtype, const Memory& plain) {
  Memory packed(plain.size());
  return static_cast<double>(plain.size()) / static_cast<double>(pack(dtype, plain, packed));
}

TEST(Lossless, GradientsGetSmaller) {
  EXPECT_GT(ratio(DType::kBFloat16, gradients(DType::kBFloat16, 60000)), 1.35);
  EXPECT_GT(ratio(DType::kFloat32, gradients(DType::kFloat32, 30000)), 1.15);
  EXPECT_GT(ratio(DType::kFloat32, widened(30000)), 2.7);
  EXPECT_GT(ratio(DType::kFloat32, Memory(4000)), 100);
}

TEST(Lossless, WhatDoesNotGetSmallerIsNotPacked) {
  std::mt19937_64 random(2);
  for (const DType dtype : kTypes)
    for (const std::size_t n : {0, 1, 2, 3, 1000}) {
      const Memory plain = draw_elements(dtype, n, Data::kRandomBits, random);
      Memory out(plain.size());
      const std::size_t size = pack(dtype, plain, out);
      EXPECT_TRUE(size == 0 || size < plain.size()) << n;
    }
}

// By hand, from the format: 1.0, 2.0 and -1.5 of bfloat16, then one that is far below.
TEST(Lossless, TheFormatIsAsWritten) {
  const std::vector<std::uint16_t> values = {0x3F80, 0x4000, 0xBFC0, 0x0001, 0x3F80,
                                             0x3F80, 0x3F80, 0x3F80, 0x3F80};
  Memory plain(2 * values.size()), packed(64);
  std::memcpy(plain.data(), values.data(), plain.size());
  packed.resize(kernels().lossless.two.pack(plain.data(), values.size(), packed.data(), 64));
  const std::vector<int> expected = {
      2,    0x80,              // two bits; the largest exponent is 128
      0xFD, 0x01, 0x08, 0x00,  // all but the second are below it, the fourth by 3 or more
      0x00,                    // its exponent
      0x00, 0x00, 0xC0, 0x01, 0x00, 0x00, 0x00, 0x00, 0x00};
  Memory bytes;
  for (const int each : expected) bytes.push_back(static_cast<std::byte>(each));
  EXPECT_EQ(packed, bytes);
}

TEST(Lossless, RefusesWhatIsCutOrLonger) {
  for (const DType dtype : kTypes) {
    const Memory plain = gradients(dtype == DType::kFloat16 ? DType::kBFloat16 : dtype, 300);
    Memory packed(plain.size()), back(plain.size());
    packed.resize(pack(dtype, plain, packed));
    ASSERT_GT(packed.size(), 0U);
    for (std::size_t size = 0; size < packed.size(); ++size)
      EXPECT_THROW(unpack(ConstBytes(packed).first(size), back), InvalidArgument) << size;
    EXPECT_THROW(unpack(packed, Bytes(back).first(back.size() - 4)), InvalidArgument);
    packed.push_back(std::byte{0});
    EXPECT_THROW(unpack(packed, back), InvalidArgument);
  }
}

// In memory of its very size, so that sanitizers see one byte too far.
TEST(Lossless, ForeignBytesAreHarmless) {
  std::mt19937_64 random(4);
  for (int trial = 0; trial < 3000; ++trial) {
    const DType dtype = kTypes[trial % 3];
    const std::size_t n = random() % 400;
    Memory foreign = gradients(dtype, n);
    if (trial % 2 == 0) foreign.resize(pack(dtype, gradients(dtype, n), foreign));
    for (int k = 0; k < 3 && !foreign.empty(); ++k)
      foreign[random() % foreign.size()] = static_cast<std::byte>(random());
    const Memory in(foreign);
    Memory y(n * size_of(dtype));
    for (const Kernels* table : available_kernels())
      EXPECT_LE(of(*table, dtype).unpack(in.data(), in.size(), y.data(), n), in.size());
    try {
      unpack(in, y);
    } catch (const InvalidArgument&) {
    }
  }
}

}  // namespace codec_lossless_test
}  // namespace gradwire::codec
