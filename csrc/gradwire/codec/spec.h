// What a codec's file needs to join the list in codec.cc: its parameters, and checks of payloads.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gradwire/codec/codec.h"

namespace gradwire::codec {

// The "key=value,key=value" of one spec. A factory takes each parameter that it knows; what is left
// over is unknown.
class Parameters {
 public:
  // Throws InvalidArgument for what is not key=value, and for a key that is given twice.
  // `what`: the kind of thing that has the name, for errors.
  Parameters(std::string_view name, std::string_view text, std::string_view what = "codec");

  // Returns the value, or `fallback` where it was not given. Throws InvalidArgument if it is no
  // number.
  double number(std::string_view key, double fallback);
  // Likewise, but throws InvalidArgument if it is no integer from `least` to `most`.
  std::uint64_t whole(std::string_view key, std::uint64_t fallback, std::uint64_t least,
                      std::uint64_t most);
  // Likewise, but throws InvalidArgument if it is no number from `least` to `most`.
  double real(std::string_view key, double fallback, double least, double most);
  // Returns the value, which must be one of `choices`, or the first of them where it was not given.
  std::string choice(std::string_view key, std::initializer_list<std::string_view> choices);
  // Returns the canonical name: with the values that were returned, but without defaults.
  std::string canonical() const { return canonical_; }
  // Throws InvalidArgument that says: `key` has the value `text`, which is `reason`.
  [[noreturn]] void refuse(std::string_view key, const std::string& text,
                           const std::string& reason) const;
  // Throws InvalidArgument that names a parameter that nobody took, and lists the known ones.
  void finish() const;

 private:
  std::string take(std::string_view key);  // the given text; empty where there is none
  void note(std::string_view key, const std::string& value);

  std::string name_, owner_;
  std::vector<std::pair<std::string, std::string>> given_;
  std::string known_;
  std::string canonical_;
};

// Returns the shortest text that parses to the same number.
std::string shortest(double value);

// Returns the "block" of a codec that works block by block: elements, a multiple of 32, 1024 by
// default.
std::size_t block_of(Parameters& parameters, std::size_t most);

// The "rounding" and "seed" of a codec that rounds to integers.
struct RoundingChoice {
  bool stochastic;
  std::uint64_t seed;
};
RoundingChoice rounding_of(Parameters& parameters);

// Makes the codec that the parameters describe. Each codec's file defines such a function,
// make_NAME.
using CodecFactory = std::shared_ptr<const Codec>(Parameters&);

// Throws InvalidArgument unless `size` bytes hold the `needed` ones of n elements.
void check_room(const Codec& codec, std::size_t size, std::size_t needed, std::size_t n);

}  // namespace gradwire::codec
