// NativeCollective: a collective as the library between the GPUs has it, on blocks in device
// memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gradwire/base/types.h"

namespace gradwire::cuda {

// At rank r of p, with `count` elements: all_reduce, broadcast, reduce: input and output have so
// many; reduce_scatter: the input has p blocks of so many, one after the other, and the output is
// block r; all_gather: the other way round; all_to_all: both have p blocks, and block s of the
// output comes from rank s. Input and output may be the same memory, where that is block r of the
// longer one; not those of an all_to_all.
struct NativeCollective {
  Collective collective = Collective::kAllReduce;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  Rank root = 0;
  const std::byte* input = nullptr;
  std::byte* output = nullptr;  // reduce: used at the root only
  std::uint64_t count = 0;
};

}  // namespace gradwire::cuda
