// Divides a finished sum by the number of ranks.
#pragma once

#include <cstddef>

#include "gradwire/base/types.h"

namespace gradwire::codec {

// x[i] := x[i] * (1 / ranks), rounded once in the element type. For types of which avg is defined.
void average(DType dtype, void* x, int ranks, std::size_t n) noexcept;

}  // namespace gradwire::codec
