// The kernels, written once; simd_<isa>.cc includes this after simd_lanes.h and makes one table of
// it. The arithmetic is the contract between all tables: binary32 (binary64 for float64), round to
// nearest even, denormals kept, each operation rounded once, no FMA, no reassociation, and NaN
// results without sign or payload (x86 takes them from either operand, as the compiler ordered
// them).
#pragma once

#include "gradwire/codec/simd_cast.h"
#include "gradwire/codec/simd_int8.h"
#include "gradwire/codec/simd_low_rank.h"
#include "gradwire/codec/simd_onebit.h"
#include "gradwire/codec/simd_reduce.h"
#include "gradwire/codec/simd_sparse.h"

namespace gradwire::codec {
namespace {

constexpr Kernels table(const char* name) {
  return {name,
          {{kReduceOf<Packed<float>>, kReduceOf<Packed<double>>,     //
            kReduceOf<Narrow<Fp16>>, kReduceOf<Narrow<Bf16>>,        //
            kReduceOf<Packed<std::uint8_t>, Packed<std::int8_t>>,    //
            kReduceOf<Packed<std::uint32_t>, Packed<std::int32_t>>,  //
            kReduceOf<Packed<std::uint64_t>, Packed<std::int64_t>>,  //
            kReduceOf<Packed<std::uint8_t>>}},
          {{scale<Packed<float>>, scale<Packed<double>>, scale<Narrow<Fp16>>, scale<Narrow<Bf16>>,
            nullptr, nullptr, nullptr, nullptr}},
          finite,
          kCastOf<Fp16>,
          kCastOf<Bf16>,
          kInt8,
          kOneBit,
          sparse::kKernels,
          low_rank::kKernels};
}

}  // namespace
}  // namespace gradwire::codec
