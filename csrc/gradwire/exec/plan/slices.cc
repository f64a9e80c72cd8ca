#include "gradwire/exec/plan/slices.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>

#include "gradwire/base/error.h"
#include "gradwire/schedule/frames.h"

namespace gradwire::exec {
namespace {

using schedule::Cut;
using schedule::Edge;
using schedule::Schedule;

std::size_t chunks_of(const Edge& edge) { return at(edge.chunks.size()); }

std::size_t shares(std::size_t all, std::size_t parts) { return (all + parts - 1) / parts; }

// Returns the most that a rank sends to another in one round, where an edge adds size_of(edge).
std::size_t most_of_message(const Schedule& schedule, const auto& size_of) {
  std::size_t most = 0;
  std::vector<std::tuple<Rank, Rank, std::size_t>> sizes;
  for (const auto& round : schedule.rounds) {
    sizes.clear();
    for (const Edge& edge : round) sizes.emplace_back(edge.src, edge.dst, size_of(edge));
    std::sort(sizes.begin(), sizes.end());
    std::size_t sum = 0;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      const auto& [src, dst, size] = sizes[i];
      const bool same =
          i > 0 && std::get<0>(sizes[i - 1]) == src && std::get<1>(sizes[i - 1]) == dst;
      sum = same ? sum + size : size;
      most = std::max(most, sum);
    }
  }
  return most;
}

// Returns, for each chunk, the bytes of its largest slice, if every chunk is cut into so many.
std::vector<std::size_t> largest_slices(int chunks, const ChunkLayout& layout,
                                        const Slices::Payload& payload, int slices) {
  std::vector<std::size_t> largest(at(chunks), 0);
  std::vector<Piece> pieces;
  for (int c = 0; c < chunks; ++c)
    for (int s = 0; s < slices; ++s) {
      pieces.clear();
      layout.append(c, s, slices, pieces);
      std::size_t bytes = 0;
      for (const Piece& piece : pieces) bytes += payload(piece);
      largest[at(c)] = std::max(largest[at(c)], bytes);
    }
  return largest;
}

// Returns the payload of the largest message, if every chunk has so many bytes.
std::size_t largest_message(const Schedule& schedule, const std::vector<std::size_t>& bytes) {
  return most_of_message(schedule, [&](const Edge& edge) {
    return std::accumulate(bytes.begin() + edge.chunks.first, bytes.begin() + edge.chunks.last,
                           std::size_t{0});
  });
}

// Returns the payload of the largest frame, at most, where the slices of each chunk have so many
// bytes.
std::size_t largest_frame(const Schedule& schedule, const Cut& cut,
                          const std::vector<std::size_t>& bytes) {
  std::map<std::pair<int, int>, std::size_t> known;  // by range of chunks
  return most_of_message(schedule, [&](const Edge& edge) {
    const auto [place, added] = known.try_emplace({edge.chunks.first, edge.chunks.last}, 0);
    if (!added) return place->second;
    std::vector<std::size_t> frames(at(cut.segments), 0);
    for (int c = edge.chunks.first; c < edge.chunks.last; ++c)
      for (int s = 0; s < cut.slices; ++s)
        frames[at((cut.segment_of_first(c) + s) % cut.segments)] += bytes[at(c)];
    return place->second = *std::max_element(frames.begin(), frames.end());
  });
}

}  // namespace

// Slices are rounded to units, so a frame may have more than its share: there are more segments
// until the largest frame fits.
Slices Slices::even(const Schedule& schedule, const ChunkLayout& layout, const Payload& payload,
                    std::size_t room, std::size_t target) {
  const int chunks = schedule.chunks;
  const auto bytes = largest_slices(chunks, layout, payload, 1);
  const std::size_t whole = largest_message(schedule, bytes);
  const std::size_t chunk = *std::max_element(bytes.begin(), bytes.end());
  std::size_t units = 1;  // of the largest chunk
  for (int c = 0; c < chunks; ++c) units = std::max(units, layout.units(c));
  const std::size_t most = units * std::max<std::size_t>(1, most_of_message(schedule, chunks_of));
  if (target == 0) target = std::max(whole / schedule::kSegmentsWanted, schedule::kSmallestSegment);
  auto cut_of = [&](std::size_t segments) {
    Cut cut = schedule::cut_into(static_cast<int>(segments), static_cast<double>(chunk),
                                 static_cast<double>(whole));
    cut.slices = std::min(cut.slices, static_cast<int>(units));
    return cut;
  };
  std::size_t segments = shares(whole, std::clamp<std::size_t>(target, 1, room));
  segments = std::clamp<std::size_t>(segments, 1, most);
  Cut cut = cut_of(segments);
  auto fits = [&] {
    return largest_frame(schedule, cut, largest_slices(chunks, layout, payload, cut.slices)) <=
           room;
  };
  while (!fits()) {
    if (segments == most)
      throw ScheduleError("not one unit of a chunk fits a message of " + std::to_string(room) +
                          " bytes, in schedule '" + schedule.name + "'");
    segments = std::min(segments + segments / 8 + 1, most);
    cut = cut_of(segments);
  }
  Slices made;
  made.segments_ = cut.segments;
  made.most_ = cut.slices;
  made.slices_.assign(at(chunks), cut.slices);
  for (int c = 0; c < chunks; ++c) made.begins_.push_back(cut.segment_of_first(c));
  return made;
}

Slices Slices::by_chunk(int chunks, const ChunkLayout& layout, std::size_t units_in_room) {
  Slices made;
  made.begins_.assign(at(chunks), 0);
  for (int c = 0; c < chunks; ++c) {
    const std::size_t slices = shares(layout.units(c), units_in_room);
    made.slices_.push_back(std::max(1, static_cast<int>(slices)));
    made.most_ = std::max(made.most_, made.slices_.back());
  }
  made.segments_ = made.most_;
  return made;
}

}  // namespace gradwire::exec
