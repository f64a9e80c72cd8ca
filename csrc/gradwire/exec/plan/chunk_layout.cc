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

ChunkLayout::ChunkLayout(const std::vector<std::uint64_t>& counts, int chunks, std::size_t unit,
                         bool chunks_are_extents)
    : unit_(unit), counts_(counts), extent_units_{0} {
  for (std::uint64_t count : counts)
    extent_units_.push_back(extent_units_.back() + (count + unit - 1) / unit);
  const auto parts = at(chunks);
  const std::size_t total = extent_units_.back(), each = counts.size() / parts;
  for (std::size_t c = 0; c < parts; ++c) {
    begins_.push_back(chunks_are_extents ? extent_units_[c * each] : even_cut(total, c, parts));
    ends_.push_back(chunks_are_extents ? extent_units_[(c + 1) * each]
                                       : even_cut(total, c + 1, parts));
  }
}

void ChunkLayout::append(int chunk, int segment, int segments, std::vector<Piece>& out) const {
  const auto s = at(segment);
  const auto all = at(segments);
  const std::size_t begin = begins_[at(chunk)];
  append_units(begin + even_cut(units(chunk), s, all), begin + even_cut(units(chunk), s + 1, all),
               out);
}

void ChunkLayout::append_units(std::size_t first, std::size_t last, std::vector<Piece>& out) const {
  if (first == last) return;
  auto next = std::upper_bound(extent_units_.begin(), extent_units_.end(), first);
  for (auto e = static_cast<std::size_t>(next - extent_units_.begin()) - 1; first < last; ++e) {
    const std::size_t end = std::min(last, extent_units_[e + 1]);
    if (end == first) continue;  // an empty extent
    const std::size_t from = (first - extent_units_[e]) * unit_;
    const std::size_t to = std::min<std::size_t>((end - extent_units_[e]) * unit_, counts_[e]);
    out.push_back({static_cast<std::uint32_t>(e), from, to - from});
    first = end;
  }
}

}  // namespace gradwire::exec
