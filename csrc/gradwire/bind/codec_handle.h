#pragma once

#include <memory>

#include "gradwire/codec/codec.h"

namespace gradwire::bind {

// A codec as Python holds it: pybind11 keeps no pointers to const.
struct CodecHandle {
  const codec::Codec& get() const { return *value; }

  std::shared_ptr<const codec::Codec> value;
};

}  // namespace gradwire::bind
