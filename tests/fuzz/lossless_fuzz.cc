// Floats that are packed, and packed bytes that pack() did not write.
//   input: a byte, whose two low bits choose the type; then plain elements, which are also packed
//   bytes
#include <algorithm>
#include <vector>

#include "fuzz.h"
#include "gradwire/base/error.h"
#include "gradwire/codec/lossless.h"
#include "gradwire/codec/simd/simd.h"

namespace gradwire::fuzz {
namespace {

constexpr std::size_t kMost = 1 << 20;  // bytes

// Every instruction set writes the same, and what is packed comes back bit for bit.
void round_trip(DType dtype, const std::vector<std::byte>& plain) {
  const std::size_t word = size_of(dtype), n = plain.size() / word;
  std::vector<std::byte> first;
  for (const codec::Kernels* table : codec::available_kernels()) {
    const auto& kernels = word == 2 ? table->lossless.two : table->lossless.four;
    std::vector<std::byte> packed(plain.size() + n / codec::LosslessKernels::kBlock + 1);
    packed.resize(kernels.pack(plain.data(), n, packed.data(), packed.size()));
    if (first.empty()) first = packed;
    require(packed == first);
    std::vector<std::byte> back(plain.size());
    require(kernels.unpack(packed.data(), packed.size(), back.data(), n) == packed.size());
    require(back == plain);
  }
  std::vector<std::byte> packed(plain.size()), back(plain.size());
  packed.resize(codec::pack(dtype, plain, packed));
  if (packed.empty()) return;
  require(packed.size() < plain.size() && codec::unpacked_bytes(packed) == plain.size());
  codec::unpack(packed, back);
  require(back == plain);
}

// In memory of its very own size, so that one byte too far is seen.
void unpack(const std::vector<std::byte>& packed) {
  try {
    const std::size_t size = codec::unpacked_bytes(packed);
    if (size > kMost) return;
    std::vector<std::byte> plain(size);
    codec::unpack(packed, plain);
  } catch (const InvalidArgument&) {
  }
}

}  // namespace
}  // namespace gradwire::fuzz

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace gradwire::fuzz;
  constexpr gradwire::DType kTypes[] = {gradwire::DType::kFloat32, gradwire::DType::kFloat16,
                                        gradwire::DType::kBFloat16, gradwire::DType::kFloat32};
  Input input(data, size);
  const gradwire::DType dtype = kTypes[input.number<std::uint8_t>() % 4];
  const gradwire::ConstBytes rest = input.rest();
  std::vector<std::byte> bytes(rest.begin(), rest.end());
  unpack(bytes);
  bytes.resize(bytes.size() / size_of(dtype) * size_of(dtype));
  if (!bytes.empty()) round_trip(dtype, bytes);
  return 0;
}
