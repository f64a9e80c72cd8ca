#include "gradwire/exec/plan/chunk_layout.h"

#include <algorithm>

namespace gradwire::exec {
namespace {

// Returns where part `part` of `parts` even parts of [0, total) begins. The products do not
// overflow for any real buffer.
std::size_t even_cut(std::size_t total, std::size_t part, std::size_t parts) {
  return total / parts * part + total % parts * part / parts;
}

}  // namespace

ChunkLayout::ChunkLayout(const std::vector<std::uint64_t>& counts, int chunks,
                         std::size_t alignment, bool chunks_are_arrays)
    : alignment_(alignment), counts_(counts), first_steps_{0} {
  for (std::uint64_t count : counts)
    first_steps_.push_back(first_steps_.back() + (count + alignment - 1) / alignment);
  const std::size_t arrays = counts.size() / at(chunks);  // of a chunk
  const auto begin = [&](std::size_t chunk) {
    return chunks_are_arrays ? first_steps_[chunk * arrays]
                             : even_cut(first_steps_.back(), chunk, at(chunks));
  };
  for (std::size_t c = 0; c < at(chunks); ++c)
    places_.push_back({begin(c), begin(c + 1) - begin(c)});
}

void ChunkLayout::append(int chunk, int part, int parts, std::vector<Span>& out) const {
  const Place& place = places_[at(chunk)];
  std::size_t first = place.first + even_cut(place.steps, at(part), at(parts));
  const std::size_t last = place.first + even_cut(place.steps, at(part) + 1, at(parts));
  if (first == last) return;
  const auto next = std::ranges::upper_bound(first_steps_, first);
  for (auto a = static_cast<std::size_t>(next - first_steps_.begin()) - 1; first < last; ++a) {
    const std::size_t end = std::min(last, first_steps_[a + 1]);
    if (end == first) continue;  // an empty array
    const std::size_t from = (first - first_steps_[a]) * alignment_;
    const std::size_t to = std::min<std::size_t>((end - first_steps_[a]) * alignment_, counts_[a]);
    out.push_back({static_cast<std::uint32_t>(a), from, to - from});
    first = end;
  }
}

}  // namespace gradwire::exec
