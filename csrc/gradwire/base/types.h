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

// Returns a rank, or another non-negative number, as an index.
constexpr std::size_t at(int i) noexcept { return static_cast<std::size_t>(i); }

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
  kBool,  // one byte: true where it is not 0; written as 0 or 1
  kComplex64,
  kComplex128,
};
inline constexpr int kDTypes = 15;

// The names are MPI's: bitwise (B) and logical (L) and, or, exclusive or.
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

// Returns the bytes of one element.
std::size_t size_of(DType dtype) noexcept;
bool is_floating(DType dtype) noexcept;
bool is_complex(DType dtype) noexcept;
// Returns whether the reduction is defined: floats have no bitwise or logical ones, complex numbers
// have only sum and avg, bool has no avg.
bool is_defined(ReduceOp op, DType dtype) noexcept;

// Returns the public spelling, the same as in Python: "float32", "sum", "all_reduce".
std::string_view name_of(DType dtype) noexcept;
std::string_view name_of(ReduceOp op) noexcept;
std::string_view name_of(Collective collective) noexcept;

// Returns the value of that name. An unknown name throws InvalidArgument that lists the known ones.
DType parse_dtype(std::string_view name);
ReduceOp parse_reduce_op(std::string_view name);
Collective parse_collective(std::string_view name);

// Returns whether the collective adds values up (all_reduce, reduce_scatter, reduce).
bool reduces(Collective collective) noexcept;

}  // namespace gradwire
