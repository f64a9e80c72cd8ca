#include "gradwire/exec/execution/key_offsets.h"

#include <string>

#include "gradwire/base/error.h"

namespace gradwire::exec {

void find_key_offsets(std::span<const std::uint64_t> counts,
                      std::span<const codec::KeyedExtent> keys, std::vector<KeyOffset>& out) {
  out.clear();
  std::size_t key = 0, used = 0;
  const auto skip_full = [&] {
    for (; key + 1 < keys.size() && used == keys[key].count; ++key) used = 0;
  };
  for (std::uint64_t count : counts) {
    skip_full();
    if (keys[key].count - used < count)
      throw InvalidArgument("error feedback: key '" + keys[key].key + "' has " +
                            std::to_string(keys[key].count) +
                            " elements, which is not where an array ends; give keys whose counts "
                            "add up to the arrays'");
    out.push_back({key, used});
    used += count;
  }
  skip_full();
  if (key + 1 < keys.size() || used < keys[key].count)
    throw InvalidArgument("error feedback: the keys have more elements than the arrays");
}

}  // namespace gradwire::exec
