// Makes plans, in passes which each take values and return one. No rank tells another which frames
// it will send, so everything on which both ends of a frame must agree (segments, cuts, order) is
// computed from what both know.
#include "gradwire/exec/plan/plan.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <string>
#include <utility>

#include "gradwire/base/error.h"
#include "gradwire/base/wire.h"
#include "gradwire/codec/reduction/fold.h"
#include "gradwire/exec/plan/chunk_layout.h"
#include "gradwire/exec/plan/request.h"
#include "gradwire/exec/plan/segmentation.h"
#include "gradwire/schedule/frames.h"

namespace gradwire::exec {
namespace {

using schedule::Edge;
using schedule::Landing;
using schedule::Schedule;

constexpr std::size_t kCacheLine = 64;

// All edges of one round between this rank and another.
struct RoundEdges {
  int round = 0;
  std::vector<Rank> peers;  // several for a send that several ranks read
  std::vector<Edge> edges;
  bool coded = false;
};
struct OwnEdges {
  std::vector<RoundEdges> sends, receives;
};

// By chunk of the schedule: the first round in which it arrives, or leaves, as a finished sum. In
// in-tree schedules these travel along copy edges: the first rank to send one finishes it, all
// others receive it. It may come back to the rank that finished it.
struct FinishedRounds {
  static constexpr int kNever = std::numeric_limits<int>::max();
  std::vector<int> arrives, leaves;

  bool travels(std::size_t chunk) const {
    return leaves[chunk] != kNever || arrives[chunk] != kNever;
  }
  // Returns whether this rank is the first to send it.
  bool starts_here(std::size_t chunk) const {
    return leaves[chunk] != kNever && leaves[chunk] <= arrives[chunk];
  }
};

// The spans of each chunk, by Segmentation::index().
struct ChunkSpans {
  std::vector<Span> spans;
  std::vector<Range> chunks;
};

// Where the payloads of finished chunks that this rank sends or forwards lie.
struct Store {
  std::vector<std::uint32_t> places;  // by Segmentation::index(); kNotStored: none
  std::vector<std::size_t> offsets;   // by place, in bytes
  std::size_t bytes = 0;
};

// By chunk of the schedule: what becomes of its addends, in order, where they are 16-bit floats.
using ChunkFolds = std::vector<std::vector<WideFold>>;

std::size_t round_up(std::size_t size, std::size_t unit) { return (size + unit - 1) / unit * unit; }

template <typename T>
std::uint32_t size32(const std::vector<T>& values) {
  return static_cast<std::uint32_t>(values.size());
}

std::size_t payload_of(const Binding& binding, const Span& span, bool coded) {
  return coded ? binding.codec->max_bytes(span.count) : span.count * size_of(binding.spec.dtype);
}

// Returns the most bytes of a span, wherever it goes.
std::size_t payload_of(const Binding& binding, const Span& span) {
  const std::size_t bytes = payload_of(binding, span, binding.is_lossy());
  return !binding.codec->between_sites() ? bytes
                                         : std::max(bytes, payload_of(binding, span, false));
}

std::size_t payload_of(const Binding& binding, const ChunkSpans& all, const Range& spans,
                       bool coded) {
  std::size_t bytes = 0;
  for (const Span& span : view(all.spans, spans)) bytes += payload_of(binding, span, coded);
  return bytes;
}

// ---- Edges -------------------------------------------------------------------------------------

std::vector<RoundEdges> by_peer(int round, const Binding& binding, const std::vector<Edge>& edges,
                                Rank Edge::* other) {
  std::vector<RoundEdges> found;
  for (const Edge& edge : edges) {
    auto at = std::ranges::find(found, edge.*other, [](const auto& each) { return each.peers[0]; });
    if (at == found.end())
      at = found.insert(at, {round, {edge.*other}, {}, binding.codes(edge.src, edge.dst)});
    at->edges.push_back(edge);
  }
  return found;
}

bool same_bytes(const RoundEdges& a, const RoundEdges& b) {
  return a.coded == b.coded &&
         std::ranges::equal(a.edges, b.edges, [](const Edge& x, const Edge& y) {
           return x.chunks == y.chunks && x.landing == y.landing;
         });
}

// Joins sends that have the same bytes and go to peers on the same transport: their bytes are
// staged once, and in shared memory several readers read one copy.
std::vector<RoundEdges> share_staging(std::vector<RoundEdges> sends,
                                      const std::vector<int>& link_of) {
  std::vector<RoundEdges> shared;
  const auto link = [&](const RoundEdges& each) {
    return link_of.empty() ? 0 : link_of[at(each.peers[0])];
  };
  for (RoundEdges& send : sends) {
    const auto same = std::ranges::find_if(shared, [&](const RoundEdges& each) {
      return same_bytes(each, send) && link(each) == link(send);
    });
    if (same == shared.end())
      shared.push_back(std::move(send));
    else
      same->peers.push_back(send.peers[0]);
  }
  return shared;
}

// Calls visit(chunk, round) for each chunk of each edge with that landing.
void each_chunk(const std::vector<RoundEdges>& rounds, Landing landing, const auto& visit) {
  for (const RoundEdges& each : rounds)
    for (const Edge& edge : each.edges)
      if (edge.landing == landing)
        for (int c = edge.chunks.first; c < edge.chunks.last; ++c) visit(at(c), each.round);
}

bool holds_result(const Schedule& schedule, Rank rank, std::size_t chunk) {
  if (schedule.collective == Collective::kReduce) return rank == schedule.root;
  return schedule.collective != Collective::kReduceScatter || at(rank) == chunk;
}

void require_one_block_a_frame(const Schedule& schedule, const OwnEdges& edges) {
  for (const auto* rounds : {&edges.sends, &edges.receives})
    for (const RoundEdges& each : *rounds)
      if (each.edges.size() > 1 || each.edges[0].chunks.size() > 1)
        throw ScheduleError("schedule '" + schedule.name + "' sends several blocks of " +
                            std::string(name_of(schedule.collective)) +
                            " in one message of round " + std::to_string(each.round) +
                            "; send each in a round of its own");
}

// ---- Frames ------------------------------------------------------------------------------------

struct EdgeChunk {
  std::uint32_t segment;
  Landing landing;
  int whole;  // see segmentation.h
  int chunk;
};

// Returns what goes between two ranks in a round by segment, and in the order of its edges in each.
std::vector<EdgeChunk> by_segment(const RoundEdges& round, const Segmentation& segmentation) {
  std::vector<EdgeChunk> found;
  for (const Edge& edge : round.edges)
    for (int w = edge.chunks.first; w < edge.chunks.last; ++w)
      for (int c = 0; c < segmentation.chunks_of(w); ++c)
        found.push_back(
            {static_cast<std::uint32_t>(segmentation.segment_of(w, c)), edge.landing, w, c});
  std::ranges::stable_sort(found, {}, &EdgeChunk::segment);
  return found;
}

std::pair<std::uint64_t, std::uint32_t> place_of(const Frame& frame) {
  return {std::uint64_t{frame.start} + frame.segment, frame.segment};
}

// Lets only the first of all sends of a chunk finish it: a second time would divide an average
// twice and feed a residual back twice.
void finish_once(PlanFrames& frames) {
  std::vector<std::uint32_t> seen;  // by first span: no other chunk has it, unless it is empty
  for (const SendFrame& frame : frames.sends)
    for (std::uint32_t i = frame.chunks.first; i < frame.chunks.last; ++i) {
      Chunk& chunk = frames.chunks[i];
      if (!chunk.completes_sum || chunk.spans.empty()) continue;
      const auto at = std::ranges::lower_bound(seen, chunk.spans.first);
      chunk.completes_sum = at == seen.end() || *at != chunk.spans.first;
      if (chunk.completes_sum) seen.insert(at, chunk.spans.first);
    }
}

bool is_averaged_wide(const std::vector<WideFold>& folds) {
  return !folds.empty() && folds.back().averages;
}

bool same_elements(const PlanFrames& frames, const Frame& a, const Frame& b) {
  return std::ranges::equal(view(frames.chunks, a.chunks), view(frames.chunks, b.chunks), {},
                            &Chunk::spans, &Chunk::spans);
}

bool only_folds(const PlanFrames& frames, const Frame& frame) {
  return std::ranges::all_of(view(frames.chunks, frame.chunks), [](const Chunk& chunk) {
    return chunk.landing == Landing::kReduce && chunk.wide.place == WideFold::kNone;
  });
}

// Returns this rank's sends and receives, by round and peer.
OwnEdges own_edges(const Schedule& schedule, const Binding& binding) {
  OwnEdges own;
  for (std::size_t r = 0; r < schedule.rounds.size(); ++r) {
    const auto& round = schedule.rounds[r];
    const auto number = static_cast<int>(r);
    auto sends = by_peer(number, binding, sends_of(round, binding.rank), &Edge::dst);
    auto receives = by_peer(number, binding, receives_of(round, binding.rank), &Edge::src);
    std::ranges::move(share_staging(std::move(sends), binding.link_of),
                      std::back_inserter(own.sends));
    std::ranges::move(receives, std::back_inserter(own.receives));
  }
  return own;
}

FinishedRounds finished_rounds(const Schedule& schedule, const Binding& binding,
                               const OwnEdges& edges) {
  FinishedRounds found;
  found.arrives.assign(at(schedule.chunks), FinishedRounds::kNever);
  found.leaves = found.arrives;
  if (!binding.in_tree || !reduces(schedule.collective)) return found;
  const auto first_of = [](std::vector<int>& first) {
    return [&first](std::size_t chunk, int round) { first[chunk] = std::min(first[chunk], round); };
  };
  each_chunk(edges.receives, Landing::kCopy, first_of(found.arrives));
  each_chunk(edges.sends, Landing::kCopy, first_of(found.leaves));
  return found;
}

// Returns at multiples of how many elements arrays may be cut: whole cache lines, so that no two
// segments share one, and whole blocks of the codec, so that its bits do not depend on the cuts.
std::size_t alignment_of(const Binding& binding) {
  const std::size_t line = kCacheLine / size_of(binding.spec.dtype);
  return binding.is_lossy() ? round_up(line, binding.codec->block()) : line;
}

ChunkLayout layout_of(const Schedule& schedule, const Binding& binding) {
  const Collective collective = schedule.collective;
  const bool in_place = collective == Collective::kAllReduce || collective == Collective::kReduce ||
                        collective == Collective::kBroadcast;
  return {binding.counts, schedule.chunks, alignment_of(binding), /*chunks_are_arrays=*/!in_place};
}

Segmentation segmentation_of(const Schedule& schedule, const Binding& binding,
                             const ChunkLayout& layout, const OwnEdges& edges) {
  const std::size_t room = binding.max_message - sizeof(FrameHeader);
  if (binding.uniform_segments)
    return Segmentation::even(
        schedule, layout, [&](const Span& span) { return payload_of(binding, span); }, room,
        binding.segment_bytes);
  require_one_block_a_frame(schedule, edges);
  return Segmentation::each_by_itself(schedule.chunks, layout,
                                      room / (alignment_of(binding) * size_of(binding.spec.dtype)));
}

ChunkSpans spans_of(const Schedule& schedule, const ChunkLayout& layout,
                    const Segmentation& segmentation) {
  ChunkSpans all;
  for (int w = 0; w < schedule.chunks; ++w)
    for (int c = 0; c < segmentation.most_chunks(); ++c) {
      const auto first = size32(all.spans);
      const int chunks = segmentation.chunks_of(w);
      if (c < chunks) layout.append(w, c, chunks, all.spans);
      all.chunks.push_back({first, size32(all.spans)});
    }
  return all;
}

// Places each finished chunk's payload at a cache line. All ranks must decode the same bytes, so
// nobody encodes a finished chunk twice.
Store place_store(const Binding& binding, const Segmentation& segmentation, const ChunkSpans& all,
                  const FinishedRounds& finished) {
  Store store;
  store.places.assign(all.chunks.size(), kNotStored);
  if (!binding.is_lossy()) return store;
  for (std::size_t i = 0; i < all.chunks.size(); ++i) {
    if (finished.leaves[i / at(segmentation.most_chunks())] == FinishedRounds::kNever) continue;
    store.places[i] = size32(store.offsets);
    store.offsets.push_back(store.bytes);
    store.bytes += round_up(payload_of(binding, all, all.chunks[i], true), kCacheLine);
  }
  return store;
}

ChunkFolds chunk_folds(const Schedule& schedule, const Binding& binding, const OwnEdges& edges,
                       const FinishedRounds& finished) {
  ChunkFolds folds(at(schedule.chunks));
  const OpSpec& spec = binding.spec;
  if (binding.is_lossy() || !reduces(spec.collective)) return folds;
  if (codec::wide_kernels(spec.dtype, spec.op) == nullptr) return folds;
  std::vector<ChunkRounds> rounds(folds.size());
  const auto note = [&rounds](std::vector<int> ChunkRounds::* kind) {
    return [&rounds, kind](std::size_t c, int round) { (rounds[c].*kind).push_back(round); };
  };
  each_chunk(edges.receives, Landing::kReduce, note(&ChunkRounds::added));
  each_chunk(edges.receives, Landing::kCopy, note(&ChunkRounds::replaced));
  each_chunk(edges.sends, Landing::kReduce, note(&ChunkRounds::sent));
  each_chunk(edges.sends, Landing::kCopy, note(&ChunkRounds::sent));
  for (std::size_t c = 0; c < folds.size(); ++c) {
    const bool has_sum_first =
        finished.travels(c) ? finished.starts_here(c) : holds_result(schedule, binding.rank, c);
    folds[c] = wide_folds(rounds[c], spec.op == ReduceOp::kAvg && binding.in_tree && has_sum_first);
  }
  return folds;
}

// Returns all frames in wavefront order, without what they wait for.
PlanFrames frames_of(const Schedule& schedule, const Binding& binding, const OwnEdges& edges,
                     const Segmentation& segmentation, const ChunkSpans& all, const Store& store,
                     const FinishedRounds& finished, const ChunkFolds& folds) {
  PlanFrames made;
  // All ranks need the same order, and not all know how many segments the others have.
  const int segments = binding.uniform_segments ? segmentation.segments() : 1;
  const std::vector<int> starts =
      schedule::starts_of(schedule::rounds_between_sites(schedule, binding.site_of), segments);
  const auto chunk_of = [&](const EdgeChunk& each, bool sends, bool coded) {
    const std::size_t i = segmentation.index(each.whole, each.chunk);
    const bool completes_sum =
        sends && finished.starts_here(at(each.whole)) && !is_averaged_wide(folds[at(each.whole)]);
    Chunk chunk{all.chunks[i], each.whole, each.landing};
    chunk.coded = coded;
    if (each.landing != Landing::kCopy) return chunk;
    chunk.completes_sum = completes_sum;
    chunk.store_index = store.places[i];
    return chunk;
  };
  const auto emit = [&](const RoundEdges& round, auto& frames, bool sends) {
    const auto first_peer = size32(made.peers);
    made.peers.insert(made.peers.end(), round.peers.begin(), round.peers.end());
    const std::size_t first = frames.size();
    for (const EdgeChunk& each : by_segment(round, segmentation)) {
      if (frames.size() == first || frames.back().segment != each.segment) {
        Frame& frame = frames.emplace_back();
        frame.segment = each.segment;
        frame.round = static_cast<std::uint16_t>(round.round);
        frame.start = static_cast<std::uint32_t>(starts[at(round.round)]);
        frame.peers = {first_peer, size32(made.peers)};
        frame.chunks = {size32(made.chunks), size32(made.chunks)};
      }
      const Chunk& chunk = made.chunks.emplace_back(chunk_of(each, sends, round.coded));
      frames.back().bytes += payload_of(binding, all, chunk.spans, round.coded);
      frames.back().chunks.last = size32(made.chunks);
    }
    for (std::size_t i = first; i < frames.size(); ++i)
      frames[i].segments = static_cast<std::uint32_t>(frames.size() - first);
  };
  for (const RoundEdges& each : edges.receives) emit(each, made.receives, /*sends=*/false);
  for (const RoundEdges& each : edges.sends) emit(each, made.sends, /*sends=*/true);
  // Stably: frames of one round keep the schedule's order, in which reductions fold, since another
  // order would give other last bits.
  std::ranges::stable_sort(made.receives, {}, place_of);
  std::ranges::stable_sort(made.sends, {}, place_of);
  finish_once(made);
  return made;
}

// Places the sums of 16-bit floats.
PlanFrames with_wide_sums(PlanFrames frames, const Segmentation& segmentation,
                          const ChunkSpans& all, const ChunkFolds& folds) {
  std::vector<std::size_t> seen(all.chunks.size(), 0);  // addends so far
  std::vector<std::uint32_t> sum_of(all.chunks.size(), 0);
  WidePlaces places;
  std::size_t most = 0;  // elements of a sum
  for (const ReceiveFrame& frame : frames.receives)
    for (std::uint32_t i = frame.chunks.first; i < frame.chunks.last; ++i) {
      Chunk& chunk = frames.chunks[i];
      const auto& its_folds = folds[at(chunk.whole)];
      if (chunk.landing != Landing::kReduce || its_folds.empty()) continue;
      const std::size_t place =
          segmentation.index(chunk.whole, segmentation.in_segment(chunk.whole, frame.segment));
      chunk.wide = its_folds[seen[place]++];
      if (chunk.wide.place == WideFold::kNone) continue;
      if (chunk.wide.begins) sum_of[place] = places.take();
      chunk.wide.place = sum_of[place];
      if (chunk.wide.ends) places.give_back(sum_of[place]);
      std::size_t elements = 0;
      for (const Span& span : view(all.spans, chunk.spans)) elements += span.count;
      most = std::max(most, elements);
    }
  frames.wide_places = places.most();
  frames.wide_elements = round_up(most, kCacheLine / sizeof(float));
  return frames;
}

// Walks over both lists in the one order that all ranks share. What a frame waits for comes earlier
// in it, in the same segment, so the ranks cannot wait for each other in a circle. A send waits for
// what landed in the rounds before; a receive waits for the sends of its own round, which read the
// buffer as it was when the round began.
PlanFrames with_waits(PlanFrames frames, int segments) {
  std::vector<std::uint32_t> landed(at(segments), 0), staged(at(segments), 0);
  std::uint32_t r = 0, s = 0;
  while (s < frames.sends.size() || r < frames.receives.size()) {
    const bool receives =
        s == frames.sends.size() ||
        (r < frames.receives.size() && place_of(frames.receives[r]) < place_of(frames.sends[s]));
    if (receives) {
      ReceiveFrame& receive = frames.receives[r++];
      receive.after_sends = staged[receive.segment];
      landed[receive.segment] = r;
    } else {
      SendFrame& send = frames.sends[s++];
      send.after_receives = landed[send.segment];
      staged[send.segment] = s;
    }
  }
  return frames;
}

// Finds the frames that are landed together: counts from the last receive back.
PlanFrames with_addends(PlanFrames frames, const Binding& binding) {
  if (binding.is_lossy()) return frames;
  const ReceiveFrame* next = nullptr;
  for (auto at = frames.receives.rbegin(); at != frames.receives.rend(); next = &*at++) {
    ReceiveFrame& frame = *at;
    if (!only_folds(frames, frame)) continue;
    const bool more = next != nullptr && next->addends > 0 && next->round == frame.round &&
                      next->segment == frame.segment && same_elements(frames, frame, *next);
    frame.addends = more ? next->addends + 1 : 1;
    frames.most_addends = std::max<std::size_t>(frames.most_addends, frame.addends);
  }
  for (SendFrame& send : frames.sends) {
    if (send.after_receives == 0) continue;
    const ReceiveFrame& last = frames.receives[send.after_receives - 1];
    send.sends_sum = last.addends == 1 && same_elements(frames, send, last);
  }
  return frames;
}

// Returns the results that no send finishes, since only this rank has them (reduce, or one rank).
std::vector<Span> results_of_own(const Schedule& schedule, const Binding& binding,
                                 const ChunkLayout& layout, const FinishedRounds& finished,
                                 const ChunkFolds& folds) {
  std::vector<Span> found;
  if (binding.folds || (binding.divisor(schedule.ranks) == 1 && !binding.is_lossy())) return found;
  for (std::size_t c = 0; c < folds.size(); ++c)
    if (holds_result(schedule, binding.rank, c) && !finished.travels(c) &&
        !is_averaged_wide(folds[c]))
      layout.append(static_cast<int>(c), 0, 1, found);
  return found;
}

// Throws ScheduleError where a rank would send a finished sum to another site that it has got from
// its own as plain numbers: encoded once more, these might change.
void require_payloads(const Schedule& schedule, const Binding& binding) {
  std::vector<bool> plain(at(schedule.ranks) * at(schedule.chunks));
  const auto place = [&](Rank rank, int chunk) {
    return at(rank) * at(schedule.chunks) + at(chunk);
  };
  for (const auto& round : schedule.rounds)
    for (const Edge& edge : round) {
      if (edge.landing != Landing::kCopy) continue;
      for (int c = edge.chunks.first; c < edge.chunks.last; ++c) {
        plain[place(edge.dst, c)] = !binding.codes(edge.src, edge.dst);
        if (!plain[place(edge.dst, c)] && plain[place(edge.src, c)])
          throw ScheduleError("codec '" + binding.codec->name() + "': by '" + schedule.name +
                              "' sums go within a site before they go to the next; use auto, or " +
                              "hierarchical(inner,outer)");
      }
    }
}

Binding checked(const Schedule& schedule, Binding binding) {
  const OpSpec& spec = binding.spec;
  const codec::Codec& codec = *binding.codec;
  check_types(spec.collective, spec.dtype, spec.op, codec);
  if (binding.is_lossy() && codec.combine() != codec::Combine::kReencode)
    throw ScheduleError("codec '" + codec.name() + "' can't be added at every hop, as schedule '" +
                        schedule.name + "' does; use algorithm 'auto'");
  if (binding.is_lossy() && !binding.in_tree)
    throw ScheduleError(
        "codec '" + codec.name() + "' encodes again at every hop, which needs " +
        "a schedule in which each rank sends its part of a sum once, to one parent; '" +
        schedule.name + "' is not one; use ring, halving_doubling, a tree, star or direct");
  if (binding.codec->between_sites()) require_payloads(schedule, binding);
  if (schedule.rounds.size() > std::numeric_limits<std::uint16_t>::max())
    throw ScheduleError("schedule '" + schedule.name + "' has more than 65535 rounds");
  return binding;
}

std::uint64_t bytes_with(const Plan& plan, const auto& frames, Rank peer) {
  std::uint64_t bytes = 0;
  for (const Frame& frame : frames)
    if (std::ranges::find(plan.peers(frame), peer) != plan.peers(frame).end()) bytes += frame.bytes;
  return bytes;
}

void note_bytes(const Frame& frame, PlanFrames& frames) {
  frames.most_bytes = std::max<std::size_t>(frames.most_bytes, frame.bytes);
}

}  // namespace

Plan::Plan(const schedule::Schedule& schedule, Binding binding)
    : binding_(checked(schedule, std::move(binding))),
      fingerprint_(spec().fingerprint()),
      text_(spec().to_string()),
      divisor_(binding_.divisor(schedule.ranks)) {
  const OwnEdges edges = own_edges(schedule, binding_);
  const FinishedRounds finished = finished_rounds(schedule, binding_, edges);
  const ChunkFolds folds = chunk_folds(schedule, binding_, edges, finished);
  const ChunkLayout layout = layout_of(schedule, binding_);
  const Segmentation segmentation = segmentation_of(schedule, binding_, layout, edges);
  ChunkSpans spans = spans_of(schedule, layout, segmentation);
  Store store = place_store(binding_, segmentation, spans, finished);
  PlanFrames frames =
      frames_of(schedule, binding_, edges, segmentation, spans, store, finished, folds);
  frames = with_wide_sums(std::move(frames), segmentation, spans, folds);
  frames = with_waits(std::move(frames), segmentation.segments());
  frames_ = with_addends(std::move(frames), binding_);
  for (const Frame& frame : frames_.sends) note_bytes(frame, frames_);
  for (const Frame& frame : frames_.receives) note_bytes(frame, frames_);
  segments_ = segmentation.segments();
  spans_ = std::move(spans.spans);
  store_offsets_ = std::move(store.offsets);
  store_bytes_ = store.bytes;
  finished_here_ = results_of_own(schedule, binding_, layout, finished, folds);
}

// In these collectives every rank's result holds data of every rank, and each frame was checked.
bool Plan::confirms_all_ranks() const noexcept {
  const Collective collective = spec().collective;
  return collective == Collective::kAllReduce || collective == Collective::kReduceScatter ||
         collective == Collective::kAllGather;
}

std::uint64_t Plan::bytes_to(Rank peer) const { return bytes_with(*this, sends(), peer); }
std::uint64_t Plan::bytes_from(Rank peer) const { return bytes_with(*this, receives(), peer); }

}  // namespace gradwire::exec
