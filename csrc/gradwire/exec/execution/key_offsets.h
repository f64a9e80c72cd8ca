// The offsets of a call's extents in its error-feedback keys.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "gradwire/codec/feedback/feedback.h"

namespace gradwire::exec {

struct KeyOffset {
  std::size_t key = 0;    // which of the call's keys
  std::size_t begin = 0;  // elements of the key before the extent
};

// Writes one offset per extent. The keys, of which there is at least one, must lie end to end over
// the extents, and each extent must belong to one key; else this throws InvalidArgument.
void find_key_offsets(std::span<const std::uint64_t> counts,
                      std::span<const codec::KeyedExtent> keys, std::vector<KeyOffset>& out);

}  // namespace gradwire::exec
