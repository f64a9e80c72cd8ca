#include "gradwire/exec/plan/segmentation.h"

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

std::size_t chunks_in(const Edge& edge) { return at(edge.chunks.size()); }

std::size_t divide_up(std::size_t all, std::size_t by) { return (all + by - 1) / by; }

// Returns the most that a rank sends to another in one round, where an edge adds size_of(edge).
std::size_t most_in_round(const Schedule& schedule, const auto& size_of) {
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

// Returns, for each whole, the bytes of its largest chunk, if every whole is cut into so many.
std::vector<std::size_t> largest_chunks(int wholes, const ChunkLayout& layout,
                                        const Segmentation::Payload& payload, int chunks) {
  std::vector<std::size_t> largest(at(wholes), 0);
  std::vector<Span> spans;
  for (int w = 0; w < wholes; ++w)
    for (int c = 0; c < chunks; ++c) {
      spans.clear();
      layout.append(w, c, chunks, spans);
      std::size_t bytes = 0;
      for (const Span& span : spans) bytes += payload(span);
      largest[at(w)] = std::max(largest[at(w)], bytes);
    }
  return largest;
}

// Returns the most bytes that go between two ranks in a round, if every whole has so many.
std::size_t most_bytes(const Schedule& schedule, const std::vector<std::size_t>& bytes) {
  return most_in_round(schedule, [&](const Edge& edge) {
    return std::accumulate(bytes.begin() + edge.chunks.first, bytes.begin() + edge.chunks.last,
                           std::size_t{0});
  });
}

// Returns the payload of the largest frame, at most, where the chunks of each whole have so many
// bytes.
std::size_t largest_frame(const Schedule& schedule, const Cut& cut,
                          const std::vector<std::size_t>& bytes) {
  std::map<std::pair<int, int>, std::size_t> known;  // by first and last
  return most_in_round(schedule, [&](const Edge& edge) {
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

// Chunks are rounded to steps of the layout, so a frame may have more than its part of the bytes:
// there are more segments until the largest frame fits.
Segmentation Segmentation::even(const Schedule& schedule, const ChunkLayout& layout,
                                const Payload& payload, std::size_t room, std::size_t target) {
  const int wholes = schedule.chunks;
  const auto bytes = largest_chunks(wholes, layout, payload, 1);
  const std::size_t all = most_bytes(schedule, bytes);
  const std::size_t whole = *std::ranges::max_element(bytes);
  std::size_t steps = 1;  // of the largest whole
  for (int w = 0; w < wholes; ++w) steps = std::max(steps, layout.steps(w));
  const std::size_t most = steps * std::max<std::size_t>(1, most_in_round(schedule, chunks_in));
  if (target == 0) target = std::max(all / schedule::kSegmentsWanted, schedule::kSmallestSegment);
  auto cut_of = [&](std::size_t segments) {
    Cut cut = schedule::cut_into(static_cast<int>(segments), static_cast<double>(whole),
                                 static_cast<double>(all));
    cut.slices = std::min(cut.slices, static_cast<int>(steps));
    return cut;
  };
  std::size_t segments = divide_up(all, std::clamp<std::size_t>(target, 1, room));
  segments = std::clamp<std::size_t>(segments, 1, most);
  Cut cut = cut_of(segments);
  auto fits = [&] {
    return largest_frame(schedule, cut, largest_chunks(wholes, layout, payload, cut.slices)) <=
           room;
  };
  while (!fits()) {
    if (segments == most)
      throw ScheduleError("not one unit of a chunk fits a message of " + std::to_string(room) +
                          " bytes, in schedule '" + schedule.name + "'");
    segments = std::min(segments + segments / 8 + 1, most);
    cut = cut_of(segments);
  }
  Segmentation made;
  made.segments_ = cut.segments;
  made.most_ = cut.slices;
  for (int w = 0; w < wholes; ++w) made.wholes_.push_back({cut.slices, cut.segment_of_first(w)});
  return made;
}

Segmentation Segmentation::each_by_itself(int wholes, const ChunkLayout& layout,
                                          std::size_t steps_in_room) {
  Segmentation made;
  for (int w = 0; w < wholes; ++w) {
    const auto chunks = static_cast<int>(divide_up(layout.steps(w), steps_in_room));
    made.wholes_.push_back({std::max(1, chunks), 0});
    made.most_ = std::max(made.most_, chunks);
  }
  made.segments_ = made.most_;
  return made;
}

}  // namespace gradwire::exec
