// The offsets of a call's extents in its error-feedback keys.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "gradwire/codec/feedback.h"

namespace gradwire::exec {

struct KeyOffset {
  std::size_t key = 0;    // which of them
  std::size_t begin = 0;  // of the extent in it, elements
};

// The keys, at least one, lie end to end over the extents, and each extent belongs to one key; else
// InvalidArgument. Writes one offset per extent.
void find_key_offsets(std::span<const std::uint64_t> counts,
                      std::span<const codec::KeyedExtent> keys, std::vector<KeyOffset>& out);

}  // namespace gradwire::exec
