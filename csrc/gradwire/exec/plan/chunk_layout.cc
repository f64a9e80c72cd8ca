#include "gradwire/exec/plan/chunk_layout.h"

#include <algorithm>

#include "gradwire/base/partition.h"

namespace gradwire::exec {

ChunkLayout::ChunkLayout(const std::vector<std::uint64_t>& counts, int chunks,
                         std::size_t alignment, bool chunks_are_arrays)
    : alignment_(alignment), counts_(counts), first_steps_{0} {
  for (std::uint64_t count : counts)
    first_steps_.push_back(first_steps_.back() + (count + alignment - 1) / alignment);
  const std::size_t arrays = counts.size() / at(chunks);  // of a chunk
  const auto begin = [&](std::size_t chunk) {
    return chunks_are_arrays ? first_steps_[chunk * arrays]
                             : even_part(first_steps_.back(), chunk, at(chunks));
  };
  for (std::size_t c = 0; c < at(chunks); ++c)
    places_.push_back({begin(c), begin(c + 1) - begin(c)});
}

void ChunkLayout::append(int chunk, int part, int parts, std::vector<Span>& out) const {
  const Place& place = places_[at(chunk)];
  const std::size_t first = place.first + even_part(place.steps, at(part), at(parts));
  const std::size_t last = place.first + even_part(place.steps, at(part) + 1, at(parts));
  for_each_span(first_steps_, first, last, [&](std::size_t a, std::size_t begin, std::size_t end) {
    const std::size_t from = begin * alignment_;
    const std::size_t to = std::min<std::size_t>(end * alignment_, counts_[a]);
    out.push_back({static_cast<std::uint32_t>(a), from, to - from});
  });
}

}  // namespace gradwire::exec
