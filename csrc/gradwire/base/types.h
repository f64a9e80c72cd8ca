// The vocabulary every layer shares: ranks, element types, reductions, collectives, byte ranges.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace gradwire {

using Rank = int;
using Bytes = std::span<std::byte>;
using ConstBytes = std::span<const std::byte>;

enum class DType : std::uint8_t {
  kFloat32,
  kFloat64,
  kFloat16,
  kBFloat16,
  kInt8,
  kInt32,
  kInt64,
  kUInt8,
  kInt16,
  kUInt16,
  kUInt32,
  kUInt64,
  kBool,  // a byte: true where it is not 0, and written as 0 or 1
  kComplex64,
  kComplex128,
};
inline constexpr int kDTypes = 15;

// Bitwise (b) and logical (l) and, or, exclusive or, as MPI names them.
enum class ReduceOp : std::uint8_t {
  kSum,
  kAvg,
  kMin,
  kMax,
  kProd,
  kBand,
  kBor,
  kBxor,
  kLand,
  kLor,
  kLxor,
};
inline constexpr int kReduceOps = 11;

enum class Collective : std::uint8_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kReduce,
  kBroadcast,
  kGather,
  kScatter,
  kAllToAll,
};
inline constexpr int kCollectives = 8;

// Bytes of one element.
std::size_t size_of(DType dtype) noexcept;
bool is_floating(DType dtype) noexcept;
bool is_complex(DType dtype) noexcept;
// Whether there is such a reduction: floats have no bitwise and logical ones, complex numbers sums
// and averages alone, bool no average.
bool is_defined(ReduceOp op, DType dtype) noexcept;

// The public spelling, the same as in Python: "float32", "sum", "all_reduce".
std::string_view name_of(DType dtype) noexcept;
std::string_view name_of(ReduceOp op) noexcept;
std::string_view name_of(Collective collective) noexcept;

// The inverse; an unknown name throws InvalidArgument that lists the known ones.
DType parse_dtype(std::string_view name);
ReduceOp parse_reduce_op(std::string_view name);
Collective parse_collective(std::string_view name);

// True when the collective adds values up (all_reduce, reduce_scatter, reduce).
bool reduces(Collective collective) noexcept;

}  // namespace gradwire
