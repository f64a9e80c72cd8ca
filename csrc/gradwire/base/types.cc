#include "gradwire/base/types.h"

#include <array>
#include <span>
#include <string>

#include "gradwire/base/named.h"

namespace gradwire {
namespace {

constexpr std::array<std::string_view, kDTypes> kDTypeNames = {
    "float32", "float64", "float16", "bfloat16", "int8", "int32",     "int64",     "uint8",
    "int16",   "uint16",  "uint32",  "uint64",   "bool", "complex64", "complex128"};
constexpr std::array<std::size_t, kDTypes> kDTypeSizes = {4, 8, 2, 2, 1, 4, 8, 1,
                                                          2, 2, 4, 8, 1, 8, 16};
constexpr std::array<std::string_view, kReduceOps> kReduceOpNames = {
    "sum", "avg", "min", "max", "prod", "band", "bor", "bxor", "land", "lor", "lxor"};
constexpr std::array<std::string_view, kCollectives> kCollectiveNames = {
    "all_reduce", "reduce_scatter", "all_gather", "reduce",
    "broadcast",  "gather",         "scatter",    "all_to_all"};

template <typename Enum>
Enum parse(const char* what, std::span<const std::string_view> names, std::string_view name) {
  return static_cast<Enum>(&find_named(what, names, name) - names.data());
}

}  // namespace

std::size_t size_of(DType dtype) noexcept { return kDTypeSizes[static_cast<std::size_t>(dtype)]; }

bool is_floating(DType dtype) noexcept {
  return dtype == DType::kFloat32 || dtype == DType::kFloat64 || dtype == DType::kFloat16 ||
         dtype == DType::kBFloat16;
}

bool is_complex(DType dtype) noexcept {
  return dtype == DType::kComplex64 || dtype == DType::kComplex128;
}

bool is_defined(ReduceOp op, DType dtype) noexcept {
  if (is_complex(dtype)) return op == ReduceOp::kSum || op == ReduceOp::kAvg;
  if (is_floating(dtype)) return op <= ReduceOp::kProd;
  return op != ReduceOp::kAvg;  // most quotients of integers are no integers
}

std::string_view name_of(DType dtype) noexcept {
  return kDTypeNames[static_cast<std::size_t>(dtype)];
}
std::string_view name_of(ReduceOp op) noexcept {
  return kReduceOpNames[static_cast<std::size_t>(op)];
}
std::string_view name_of(Collective collective) noexcept {
  return kCollectiveNames[static_cast<std::size_t>(collective)];
}

DType parse_dtype(std::string_view name) { return parse<DType>("dtype", kDTypeNames, name); }
ReduceOp parse_reduce_op(std::string_view name) {
  return parse<ReduceOp>("op", kReduceOpNames, name);
}
Collective parse_collective(std::string_view name) {
  return parse<Collective>("collective", kCollectiveNames, name);
}

bool reduces(Collective collective) noexcept {
  return collective == Collective::kAllReduce || collective == Collective::kReduceScatter ||
         collective == Collective::kReduce;
}

}  // namespace gradwire
