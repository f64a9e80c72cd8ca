// A whole array as one payload, outside of any collective: for programs that store or send payloads
// themselves. It is what an all_reduce or a push sends of such an array; lowrank, of which only
// sums of factors travel there, has both factors of the one matrix here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "gradwire/codec/codec.h"
#include "gradwire/codec/feedback/feedback.h"

namespace gradwire::codec {

// An array's shape, which only lowrank needs; other codecs take its elements as they lie.
struct MatrixShape {
  std::size_t rows = 0, columns = 0;

  std::size_t elements() const noexcept { return rows * columns; }
};

// Returns the most bytes that encode_array() writes.
std::size_t most_payload(const Codec& codec, MatrixShape shape) noexcept;

// Writes the payload of x plus the key's residual; returns its bytes. What it does not hold becomes
// the new residual; where x or the sum holds NaN or Inf, the payload does too and the residual
// stays. Without `feedback` there is none, and `call` tells random roundings apart. Throws
// InvalidArgument where the key is in use or its residual has another length.
std::size_t encode_array(const Codec& codec, const float* x, MatrixShape shape, Bytes out,
                         ErrorFeedback* feedback, const std::string& key, std::uint64_t call);

// y := decoded. `in` is not trusted: one that no array of this shape has throws InvalidArgument.
void decode_array(const Codec& codec, ConstBytes in, MatrixShape shape, float* y);

}  // namespace gradwire::codec
