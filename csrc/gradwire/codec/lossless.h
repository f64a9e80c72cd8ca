// Floats in fewer bytes, of which no bit is lost: what `codec="lossless"` sends. The format is in
// lossless.cc.
#pragma once

#include <cstddef>

#include "gradwire/base/types.h"

namespace gradwire::codec {

// Returns whether elements of the type get smaller: float32, float16 and bfloat16.
bool packs(DType dtype) noexcept;

// Writes the elements to `out`, of any alignment; returns the bytes. Returns 0, and `out` may have
// any content, where they do not get smaller or are no whole elements. `out` has room for as many
// bytes as `plain`.
std::size_t pack(DType dtype, ConstBytes plain, Bytes out) noexcept;

// Returns how many bytes the packed elements say they are when they are unpacked; 0 if these are no
// packed elements.
std::size_t unpacked_bytes(ConstBytes packed) noexcept;
// Unpacks the elements into `plain`, which must be as long as they are. The packed bytes are not
// trusted. Throws InvalidArgument where they are not what pack() writes for so many elements.
void unpack(ConstBytes packed, Bytes plain);

}  // namespace gradwire::codec
