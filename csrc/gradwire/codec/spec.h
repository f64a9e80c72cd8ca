// What a codec's file needs to join the list in codec.cc: its parameters, and checks of payloads.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gradwire/codec/codec.h"

namespace gradwire::codec {

// The "key=value,key=value" of one spec. A maker takes each parameter that it knows; what is left
// over is unknown.
class Parameters {
 public:
  // Throws InvalidArgument for what is not key=value, or given twice.
  Parameters(std::string_view codec, std::string_view text);

  // The value, or `fallback` where it was not given; InvalidArgument for what is no number.
  double number(std::string_view key, double fallback);
  // Throws InvalidArgument that names a parameter nobody took, and lists the known ones.
  void finish() const;

 private:
  std::string codec_;
  std::vector<std::pair<std::string, std::string>> given_;
  std::string known_;
};

// One a codec: its file defines it, codec.cc lists it.
using Maker = std::shared_ptr<const Codec>(Parameters&);
Maker make_none, make_fp16, make_bf16;

// InvalidArgument unless `size` bytes hold the `needed` ones of n elements.
void check_room(const Codec& codec, std::size_t size, std::size_t needed, std::size_t n);

}  // namespace gradwire::codec
