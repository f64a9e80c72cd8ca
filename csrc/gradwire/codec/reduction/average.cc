#include "gradwire/codec/reduction/average.h"

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "gradwire/codec/simd/simd.h"

namespace gradwire::codec {
namespace {

// Divides in 64 bits, since there may be more ranks than T can represent.
template <typename T>
void divide(void* x, int ranks, std::size_t n) noexcept {
  using Wide = std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>;
  auto* at = static_cast<std::byte*>(x);
  for (std::size_t i = 0; i < n; ++i, at += sizeof(T)) {
    T value;
    std::memcpy(&value, at, sizeof value);
    value = static_cast<T>(static_cast<Wide>(value) / static_cast<Wide>(ranks));
    std::memcpy(at, &value, sizeof value);
  }
}

}  // namespace

void average(DType dtype, void* x, int ranks, std::size_t n) noexcept {
  switch (dtype) {
    case DType::kInt8:
      return divide<std::int8_t>(x, ranks, n);
    case DType::kInt16:
      return divide<std::int16_t>(x, ranks, n);
    case DType::kInt32:
      return divide<std::int32_t>(x, ranks, n);
    case DType::kInt64:
      return divide<std::int64_t>(x, ranks, n);
    case DType::kUInt8:
      return divide<std::uint8_t>(x, ranks, n);
    case DType::kUInt16:
      return divide<std::uint16_t>(x, ranks, n);
    case DType::kUInt32:
      return divide<std::uint32_t>(x, ranks, n);
    case DType::kUInt64:
      return divide<std::uint64_t>(x, ranks, n);
    case DType::kBool:
      return;
    default:
      kernels().scale[static_cast<std::size_t>(dtype)](x, 1.0 / ranks, n);
  }
}

}  // namespace gradwire::codec
