// Slots are packed as the CPU writes units, one behind the other; and lengths that don't fit
// refused.
#include <gtest/gtest.h>

#include <numeric>

#include "cuda_kernels.h"

namespace gradwire::cuda {
namespace {

using Sizes = std::vector<std::uint32_t>;
using Offsets = std::vector<std::uint64_t>;

constexpr std::uint64_t kAny = ~std::uint64_t{0};

Offsets sums_of(const Sizes& sizes) {
  Offsets sums(sizes.size() + 1);
  for (std::size_t i = 0; i < sizes.size(); ++i) sums[i + 1] = sums[i] + sizes[i];
  return sums;
}

class CudaSlots : public testing::Test {
 protected:
  Sizes draw_sizes(std::size_t units, std::uint32_t most) {
    Sizes sizes(units);
    for (auto& each : sizes) each = static_cast<std::uint32_t>(random_() % (most + 1));
    return sizes;
  }

  std::mt19937_64 random_{13};
};

void expect_offsets(const Sizes& sizes, std::uint64_t most, std::uint64_t limit,
                    const Offsets& expected, std::uint32_t flag) {
  const DeviceArray<std::uint32_t> in(sizes);
  const DeviceArray<std::uint64_t> out(Offsets(sizes.size() + 1, 99));
  const DeviceArray<std::uint32_t> flags({0});
  RUN(api().offsets(in.data(), sizes.size(), most, limit, out.data(), flags.data(), stream()));
  EXPECT_TRUE(same(out.values(), expected));
  EXPECT_EQ(flags.value(), flag);
}

// Many enough for several blocks of threads.
TEST_F(CudaSlots, OffsetsAreSums) {
  for (const std::size_t units : {0, 1, 31, 1023, 1024, 1025, 4096, 4097, 9000, 70000}) {
    const Sizes sizes = draw_sizes(units, 272);
    const Offsets sums = sums_of(sizes);
    expect_offsets(sizes, 272, sums.back(), sums, 0);
  }
}

TEST_F(CudaSlots, SumsAreOf64Bits) {
  const Sizes sizes(9000, 0xFFFFFFFFU);
  expect_offsets(sizes, 0xFFFFFFFFU, kAny, sums_of(sizes), 0);
}

TEST_F(CudaSlots, RefusesMoreThanThereIs) {
  for (const std::size_t units : {1, 700, 9000}) {
    Sizes sizes = draw_sizes(units, 272);
    const Offsets zeros(units + 1);
    sizes.front() = 272;
    expect_offsets(sizes, 272, sums_of(sizes).back() - 1, zeros, kRefused);
    sizes[random_() % units] = 273;
    expect_offsets(sizes, 272, kAny, zeros, kRefused);
    sizes.back() = 0xFFFFFFFFU;
    expect_offsets(sizes, 272, kAny, zeros, kRefused);
  }
}

TEST_F(CudaSlots, PackedUnitsFollowEachOther) {
  for (const std::size_t units : {0, 1, 9, 300})
    for (const std::size_t slot : {16, 272, 1024, 1040, 5008})
      for (const bool even : {false, true}) {
        if (units * slot > 1000000) continue;
        Sizes sizes = draw_sizes(units, static_cast<std::uint32_t>(slot));
        if (even)
          for (auto& each : sizes) each = each / 4 * 4;
        if (units > 0) sizes.back() = static_cast<std::uint32_t>(slot);
        const Offsets sums = sums_of(sizes);
        const auto bytes = draw_bytes(units * slot, random_);
        std::vector<std::byte> expected(sums.back());
        for (std::size_t i = 0; i < units; ++i)
          std::memcpy(expected.data() + sums[i], bytes.data() + i * slot, sizes[i]);
        const DeviceArray<std::byte> slots(bytes, 0);
        const DeviceArray<std::uint32_t> lengths(sizes);
        const DeviceArray<std::uint64_t> offsets(Offsets(units + 1, 99));
        const DeviceArray<std::byte> out(std::vector<std::byte>(sums.back()), 0);
        RUN(api().pack(slots.data(), slot, lengths.data(), units, offsets.data(), out.data(),
                       stream()));
        ASSERT_TRUE(same(out.values(), expected)) << units << " of " << slot;
        ASSERT_TRUE(same(offsets.values(), sums)) << units << " of " << slot;
      }
}

TEST_F(CudaSlots, NothingIsDoneWithNothing) {
  RUN(api().pack(nullptr, 16, nullptr, 0, nullptr, nullptr, stream()));
  RUN(api().offsets(nullptr, 0, 16, 0, nullptr, nullptr, stream()));
}

}  // namespace
}  // namespace gradwire::cuda
