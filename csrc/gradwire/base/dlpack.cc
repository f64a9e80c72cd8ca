#include "gradwire/base/dlpack.h"

#include <limits>
#include <string>

#include "gradwire/base/error.h"

namespace gradwire {
namespace {

constexpr std::int32_t kMostDimensions = 64;  // the limit of NumPy and torch
constexpr std::uint8_t kBool = 6;             // kDLBool, whose elements are bytes
constexpr std::uint64_t kReadOnly = 1, kCopied = 2;
// No array is larger, since ptrdiff_t must hold the difference of any two of its addresses.
constexpr std::uint64_t kMostBytes = std::numeric_limits<std::ptrdiff_t>::max();

void require(bool holds, const std::string& what) {
  if (!holds) throw InvalidArgument("a DLPack array " + what);
}

void check_element(const DLTensor& tensor) {
  require(tensor.lanes == 1, "has elements of " + std::to_string(tensor.lanes) +
                                 " lanes each, and gradwire takes those of one: give an array with "
                                 "one dimension more");
  require(tensor.bits != 0 && tensor.bits % 8 == 0,
          "has elements of " + std::to_string(tensor.bits) + " bits, which are no whole bytes");
  require(tensor.code != kBool || tensor.bits == 8,
          "has bools of " + std::to_string(tensor.bits) + " bits, and not of 8");
}

std::vector<std::int64_t> shape_of(const DLTensor& tensor) {
  require(tensor.ndim >= 0 && tensor.ndim <= kMostDimensions,
          "has " + std::to_string(tensor.ndim) + " dimensions, not 0 to 64");
  if (tensor.ndim == 0) return {};
  require(tensor.shape != nullptr, "has dimensions, and no shape");
  return {tensor.shape, tensor.shape + tensor.ndim};
}

// Returns the number of elements: 0 where one size is 0, however large the others are.
std::uint64_t count_of(const std::vector<std::int64_t>& shape, std::size_t element_bytes) {
  std::uint64_t count = 1;
  bool empty = false;
  for (std::int64_t size : shape) {
    require(size >= 0, "has a dimension of size " + std::to_string(size));
    empty = empty || size == 0;
  }
  if (empty) return 0;
  const std::uint64_t most = kMostBytes / element_bytes;
  for (std::int64_t size : shape) {
    require(static_cast<std::uint64_t>(size) <= most / count, "is larger than any memory");
    count *= static_cast<std::uint64_t>(size);
  }
  return count;
}

std::uintptr_t address_of(const DLTensor& tensor, std::uint64_t bytes) {
  if (bytes == 0) return 0;
  require(tensor.data != nullptr, "has elements, and no memory");
  const auto start = reinterpret_cast<std::uintptr_t>(tensor.data);
  constexpr std::uintptr_t last = std::numeric_limits<std::uintptr_t>::max();
  require(tensor.byte_offset <= last - start && bytes <= last - start - tensor.byte_offset,
          "lies beyond the end of memory");
  return start + tensor.byte_offset;
}

// Returns whether the array is row-major. count_of() must have accepted the shape.
bool is_row_major(const std::vector<std::int64_t>& shape, const std::int64_t* strides) {
  std::int64_t step = 1;
  for (std::size_t i = shape.size(); i-- > 0; step *= shape[i])
    if (shape[i] != 1 && strides[i] != step) return false;
  return true;
}

}  // namespace

DLPackArray read_dlpack(const DLTensor& tensor) {
  check_element(tensor);
  DLPackArray array;
  array.device_type = tensor.device_type;
  array.device_id = tensor.device_id;
  array.code = tensor.code;
  array.element_bytes = tensor.bits / 8U;
  array.shape = shape_of(tensor);
  const std::uint64_t count = count_of(array.shape, array.element_bytes);
  array.address = address_of(tensor, count * array.element_bytes);
  array.contiguous =
      count == 0 || tensor.strides == nullptr || is_row_major(array.shape, tensor.strides);
  return array;
}

DLPackArray read_dlpack(const DLManagedTensorVersioned& managed) {
  if (managed.major != 1)
    throw InvalidArgument(str_cat("DLPack ", managed.major, " is not known, 1 is"));
  DLPackArray array = read_dlpack(managed.tensor);
  array.writable = (managed.flags & (kReadOnly | kCopied)) == 0;
  return array;
}

}  // namespace gradwire
