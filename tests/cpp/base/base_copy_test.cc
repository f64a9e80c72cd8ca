#include "gradwire/base/copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace gradwire {
namespace base_copy_test {

constexpr std::byte kUntouched{0xee};

std::vector<std::byte> numbered(std::size_t bytes) {
  std::vector<std::byte> all(bytes);
  for (std::size_t i = 0; i < bytes; ++i) all[i] = static_cast<std::byte>(i * 7 % 251);
  return all;
}

TEST(Copy, WritesItsBytesAndNoOthersWhereverTheyLie) {
  constexpr std::size_t kAround = 128;
  const std::vector<std::byte> from = numbered(5000);
  for (const Copy copy : {copy_cached, copy_streaming}) {
    for (std::size_t bytes : {0, 1, 63, 64, 1023, 1024, 1087, 1088, 4096, 4500}) {
      for (std::size_t shift : {0, 1, 32, 63}) {
        std::vector<std::byte> to(bytes + 2 * kAround, kUntouched);
        copy(to.data() + kAround + shift, from.data() + shift, bytes);
        std::vector<std::byte> expected(to.size(), kUntouched);
        std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(shift), bytes,
                    expected.begin() + static_cast<std::ptrdiff_t>(kAround + shift));
        ASSERT_EQ(to, expected) << bytes << " bytes, " << shift << " beside a line";
      }
    }
  }
}

TEST(Copy, TakesNullForNoBytes) {
  copy_cached(nullptr, nullptr, 0);
  copy_streaming(nullptr, nullptr, 0);
}

}  // namespace base_copy_test
}  // namespace gradwire
