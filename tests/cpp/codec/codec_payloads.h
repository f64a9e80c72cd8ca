// Payloads of a codec: made, and read back.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

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

}  // namespace gradwire::codec
