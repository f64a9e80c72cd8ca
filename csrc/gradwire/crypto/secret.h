// Secret: bytes that are wiped when they are not needed any more.
#pragma once

#include <algorithm>
#include <array>

#include "gradwire/base/types.h"
#include "gradwire/crypto/libcrypto.h"

namespace gradwire::crypto {

template <std::size_t kBytes>
class Secret {
 public:
  Secret() = default;
  explicit Secret(ConstBytes bytes) { std::copy_n(bytes.begin(), kBytes, bytes_.begin()); }
  Secret(const Secret&) = default;
  Secret& operator=(const Secret&) = default;
  ~Secret() { libcrypto().cleanse(bytes_.data(), kBytes); }

  std::byte* data() noexcept { return bytes_.data(); }
  ConstBytes bytes() const noexcept { return bytes_; }

 private:
  std::array<std::byte, kBytes> bytes_{};
};

inline constexpr std::size_t kKeyBytes = 32;
using Key = Secret<kKeyBytes>;

}  // namespace gradwire::crypto
