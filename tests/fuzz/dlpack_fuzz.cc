// A DLPack array: whatever its library says of it, what is taken lies within memory.
//   input: a struct's fields one after the other, a byte for each of "no data, no shape, no
//   strides", then as many sizes and strides as there are bytes for
#include <algorithm>
#include <cstddef>
#include <vector>

#include "fuzz.h"
#include "gradwire/base/dlpack.h"

namespace gradwire::fuzz {
namespace {

// What is promised of an array that is taken, whose sizes and strides are those given.
void require_sound(const DLPackArray& array, const DLTensor& given) {
  require(array.shape.size() == static_cast<std::size_t>(given.ndim) && array.element_bytes > 0);
  auto bytes = static_cast<std::ptrdiff_t>(array.element_bytes);
  if (std::ranges::find(array.shape, 0) != array.shape.end()) return;
  for (std::int64_t size : array.shape)
    require(size > 0 && !__builtin_mul_overflow(bytes, size, &bytes));
  std::uintptr_t end = 0;
  require(array.address >= reinterpret_cast<std::uintptr_t>(given.data));
  require(!__builtin_add_overflow(array.address, bytes, &end));
}

std::vector<std::int64_t> numbers(Input& input, std::size_t count) {
  std::vector<std::int64_t> values(count);
  for (std::int64_t& each : values) each = input.number<std::int64_t>();
  return values;
}

void read(Input input) {
  DLManagedTensorVersioned managed;
  managed.major = input.number<std::uint8_t>();
  managed.flags = input.number<std::uint8_t>();
  DLTensor& tensor = managed.tensor;
  tensor.ndim = input.number<std::int32_t>();
  tensor.code = input.number<std::uint8_t>();
  tensor.bits = input.number<std::uint8_t>();
  tensor.lanes = input.number<std::uint16_t>();
  tensor.byte_offset = input.number<std::uint64_t>();
  const auto missing = input.number<std::uint8_t>();
  tensor.data = reinterpret_cast<void*>(input.number<std::uintptr_t>());
  // An array has as many sizes as dimensions; whoever has too many dimensions has none.
  const bool many = tensor.ndim < 0 || tensor.ndim > 64;
  const auto dimensions = many ? std::size_t{0} : static_cast<std::size_t>(tensor.ndim);
  const std::vector<std::int64_t> shape = numbers(input, dimensions);
  const std::vector<std::int64_t> strides = numbers(input, dimensions);
  tensor.shape = (missing & 1) != 0 ? nullptr : shape.data();
  tensor.strides = (missing & 2) != 0 ? nullptr : strides.data();
  require_sound(read_dlpack(managed), tensor);
}

}  // namespace
}  // namespace gradwire::fuzz

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    gradwire::fuzz::read({data, size});
  } catch (const gradwire::InvalidArgument&) {
  }
  return 0;
}
