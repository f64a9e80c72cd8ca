// ParameterTable: what all clients of a parameter server must agree on. The first client to join
// sets it; others are refused unless theirs is the same.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "gradwire/base/types.h"

namespace gradwire::serve {

struct Parameter {
  std::string name;                  // no line break; no two have the same
  std::vector<std::uint64_t> shape;  // empty for a scalar

  std::uint64_t elements() const noexcept;
  bool operator==(const Parameter&) const = default;
};

struct ParameterTable {
  std::vector<Parameter> parameters;           // in the order of the arrays of push() and pull()
  std::string rule = "sgd:rate=0.1";           // make_rule()'s, canonical
  std::vector<std::string> codecs = {"none"};  // make_codec()'s, canonical; "none" comes first
  std::uint32_t shards = 1;
  bool atomic_push = false;  // a push is applied at once when all of it is there, else by frames
  bool divide = false;       // divide the rate by the push's staleness
  std::uint64_t max_staleness = ~std::uint64_t{0};  // pushes above it are refused
  DType dtype = DType::kFloat32;  // of all elements; or float64 with the rule kStaged, codec none

  std::uint64_t elements() const noexcept;
  // Returns the float32 words of an element, 1 or 2: values are stored and sent as words.
  std::size_t words() const noexcept { return dtype == DType::kFloat64 ? 2 : 1; }
  // Returns whether shards hold vectors, and keep pushes until a coordinator adds them up.
  bool staged() const noexcept;
  std::uint16_t index_of(const std::string& codec) const;  // throws InvalidArgument

  std::string text() const;
  std::uint64_t digest() const;
  // Returns the bits of the digest that frame headers carry; never 0.
  std::uint16_t mark() const;
  // Throws InvalidArgument for a text that text() does not write, an unknown rule or codec, options
  // that exclude each other, no parameters, more than 2^36 elements, fewer elements (or blocks of
  // vectors) than shards, and more text than kMostTableText.
  static ParameterTable parse(std::string_view text);
  // Throws as parse() does.
  void check() const;

  bool operator==(const ParameterTable&) const = default;
};

// The longest text that a server accepts, in bytes.
inline constexpr std::size_t kMostTableText = std::size_t{1} << 24;

// Returns how two tables differ, in one phrase: "parameter 3 is 'fc.weight' (10x5), not 'fc.bias'
// (10)".
std::string difference(const ParameterTable& theirs, const ParameterTable& ours);

}  // namespace gradwire::serve
