// DLPack: the C structs of DLPack 1 (https://dmlc.github.io/dlpack/latest/c_api.html), which
// describe arrays of any library. They come from foreign code, so every field is checked before it
// is used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gradwire {

struct DLTensor {
  void* data = nullptr;
  std::int32_t device_type = 0;
  std::int32_t device_id = 0;
  std::int32_t ndim = 0;
  std::uint8_t code = 0;
  std::uint8_t bits = 0;
  std::uint16_t lanes = 0;
  const std::int64_t* shape = nullptr;
  const std::int64_t* strides = nullptr;  // null: row-major without gaps
  std::uint64_t byte_offset = 0;
};

struct DLManagedTensorVersioned {
  std::uint32_t major = 0, minor = 0;
  void* manager = nullptr;
  void (*deleter)(DLManagedTensorVersioned*) = nullptr;
  std::uint64_t flags = 0;
  DLTensor tensor;
};

// What gradwire needs to know about an array.
struct DLPackArray {
  std::uintptr_t address = 0;
  std::int32_t device_type = 0;
  std::int32_t device_id = 0;
  std::uint8_t code = 0;
  std::size_t element_bytes = 0;
  std::vector<std::int64_t> shape;
  bool contiguous = false;  // row-major without gaps
  bool writable = true;     // false for read-only arrays and for copies
};

// Throws InvalidArgument for values that no library may give (negative sizes, memory that wraps
// around) and for elements that gradwire does not support (several lanes, fractions of a byte).
DLPackArray read_dlpack(const DLTensor& tensor);
DLPackArray read_dlpack(const DLManagedTensorVersioned& managed);

}  // namespace gradwire
