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
};
inline constexpr int kDTypes = 8;

enum class ReduceOp : std::uint8_t { kSum, kAvg, kMin, kMax, kProd };
inline constexpr int kReduceOps = 5;

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
