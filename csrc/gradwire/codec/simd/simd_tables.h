// The tables. Each is safe to call only where simd.cc has found its instruction set.
#pragma once

#include "gradwire/codec/simd/simd.h"

namespace gradwire::codec {

extern const Kernels kScalarKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;

}  // namespace gradwire::codec
