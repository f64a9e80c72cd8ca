// Secret: bytes that are wiped when they are destroyed.
#pragma once

#include <algorithm>
#include <array>

#include "gradwire/base/types.h"

namespace gradwire::crypto {

// Overwrites bytes, in a way that no compiler leaves out because nobody reads them again.
inline void wipe(Bytes bytes) noexcept {
  std::ranges::fill(bytes, std::byte{0});
  asm volatile("" : : "r"(bytes.data()) : "memory");
}

template <std::size_t kBytes>
class Secret {
 public:
  Secret() = default;
  explicit Secret(ConstBytes bytes) { std::copy_n(bytes.begin(), kBytes, bytes_.begin()); }
  Secret(const Secret&) = default;
  Secret& operator=(const Secret&) = default;
  ~Secret() { wipe(bytes_); }

  std::byte* data() noexcept { return bytes_.data(); }
  ConstBytes bytes() const noexcept { return bytes_; }

 private:
  std::array<std::byte, kBytes> bytes_{};
};

inline constexpr std::size_t kKeyBytes = 32;
using Key = Secret<kKeyBytes>;

}  // namespace gradwire::crypto
