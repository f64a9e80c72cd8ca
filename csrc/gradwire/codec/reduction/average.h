// Divides a finished sum by the number of ranks.
#pragma once

#include <cstddef>

#include "gradwire/base/types.h"

namespace gradwire::codec {

// x[i] := x[i] / ranks. For floats that is x[i] * (1 / ranks), rounded once in the element type;
// for integers it truncates toward zero. A sum that has wrapped stays wrong. Not defined for bool.
void average(DType dtype, void* x, int ranks, std::size_t n) noexcept;

}  // namespace gradwire::codec
