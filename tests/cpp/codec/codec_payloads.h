// Payloads of a codec, made and read back, and names that are none.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

#include "gradwire/base/error.h"
#include "gradwire/codec/codec.h"

namespace gradwire::codec {

using Values = std::vector<float>;
using Payload = std::vector<std::byte>;

inline Payload encode(const Codec& codec, const Values& x, EncodeContext context = {}) {
  Payload payload(codec.max_bytes(x.size()));
  payload.resize(codec.encode(x.data(), x.size(), context, payload));
  return payload;
}

inline Values decode(const Codec& codec, const Payload& payload, std::size_t n) {
  Values y(n, 9.0F);
  EXPECT_EQ(codec.decode(payload, y.data(), n).bytes, payload.size());
  return y;
}

// Expects that there is no codec of this name, for a reason that has the text.
inline void expect_refused(const std::string& name, const std::string& text) {
  try {
    make_codec(name);
    ADD_FAILURE() << name << " was accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

}  // namespace gradwire::codec
