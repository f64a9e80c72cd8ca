// Where a call's extents lie in its keys.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "gradwire/codec/feedback.h"

namespace gradwire::exec {

struct KeyPlace {
  std::size_t key = 0;    // which of them
  std::size_t begin = 0;  // of the extent in it, elements
};

// The keys, of which there is one at least, lie end to end over the extents, each of which belongs
// to one key; else InvalidArgument. One place for each extent.
void place_in_keys(std::span<const std::uint64_t> counts, std::span<const codec::KeyedExtent> keys,
                   std::vector<KeyPlace>& out);

}  // namespace gradwire::exec
