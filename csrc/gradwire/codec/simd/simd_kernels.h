// The kernels, written once; simd_<isa>.cc includes this after simd_lanes.h and makes one table of
// it. The arithmetic is the contract between all tables: binary32 (binary64 for float64), round to
// nearest even, denormals kept, each operation rounded once, no FMA but in the update rules, no
// reassociation, and NaN results without sign or payload (x86 takes them from either operand, as
// the compiler ordered them).
#pragma once

#include "gradwire/codec/simd/simd_cast.h"
#include "gradwire/codec/simd/simd_int4.h"
#include "gradwire/codec/simd/simd_int8.h"
#include "gradwire/codec/simd/simd_lossless.h"
#include "gradwire/codec/simd/simd_lowrank.h"
#include "gradwire/codec/simd/simd_onebit.h"
#include "gradwire/codec/simd/simd_reduce.h"
#include "gradwire/codec/simd/simd_rules.h"
#include "gradwire/codec/simd/simd_sparse.h"

namespace gradwire::codec {
namespace {

constexpr Kernels table(const char* name) {
  return {name,
          {{kReduceFloats<Packed<float>>, kReduceFloats<Packed<double>>,  //
            kReduceFloats<Narrow<Fp16>>, kReduceFloats<Narrow<Bf16>>,     //
            kReduceIntegers<std::uint8_t, std::int8_t>,                   //
            kReduceIntegers<std::uint32_t, std::int32_t>,                 //
            kReduceIntegers<std::uint64_t, std::int64_t>,                 //
            kReduceIntegers<std::uint8_t>,                                //
            kReduceIntegers<std::uint16_t, std::int16_t>,                 //
            kReduceIntegers<std::uint16_t>, kReduceIntegers<std::uint32_t>,
            kReduceIntegers<std::uint64_t>, kReduceBool,  //
            kReducePairs<Packed<float>>, kReducePairs<Packed<double>>}},
          {{scale<Packed<float>>, scale<Packed<double>>, scale<Narrow<Fp16>>, scale<Narrow<Bf16>>,
            nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
            scale_pairs<Packed<float>>, scale_pairs<Packed<double>>}},
          {kWideOf<Narrow<Fp16>, Sum>, kWideOf<Narrow<Fp16>, Prod>, kWideOf<Narrow<Bf16>, Sum>,
           kWideOf<Narrow<Bf16>, Prod>},
          finite,
          kCastOf<Fp16>,
          kCastOf<Bf16>,
          bf16_at_random,
          kInt8,
          int4::kKernels,
          kOneBit,
          sparse::kKernels,
          lowrank::kKernels,
          lossless::kKernels,
          kRules};
}

}  // namespace
}  // namespace gradwire::codec
