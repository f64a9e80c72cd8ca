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
#include "gradwire/exec/plan/slices.h"
#include "gradwire/schedule/frames.h"

namespace gradwire::exec {
namespace {

using schedule::Edge;
using schedule::kLag;
using schedule::Landing;
using schedule::Schedule;

constexpr std::size_t kCacheLine = 64;

// All edges of one round between this rank and another.
struct RoundEdges {
  int round = 0;
  std::vector<Rank> peers;  // several for a send that several ranks read
  std::vector<Edge> edges;
};
struct OwnEdges {
  std::vector<RoundEdges> sends, receives;
};

// By chunk of the schedule: the first round in which it arrives, or leaves, finished. In in-tree
// schedules finished values travel along copy edges: the first rank to send one finishes it, all
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

// By Slices::index(): the pieces of each slice.
struct Cuts {
  std::vector<Piece> pieces;
  std::vector<Range> slices;
};

// Where the payloads of finished chunks that this rank sends or forwards lie.
struct Store {
  std::vector<std::uint32_t> places;  // by Slices::index(); kNotStored: none
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

std::size_t payload_of(const Binding& binding, const Piece& piece) {
  return binding.is_lossy() ? binding.codec->max_bytes(piece.count)
                            : piece.count * size_of(binding.spec.dtype);
}

std::size_t payload_of(const Binding& binding, const Cuts& cuts, const Range& pieces) {
  std::size_t bytes = 0;
  for (const Piece& piece : view(cuts.pieces, pieces)) bytes += payload_of(binding, piece);
  return bytes;
}

// ---- Edges -------------------------------------------------------------------------------------

std::vector<RoundEdges> by_peer(int round, const std::vector<Edge>& edges, Rank Edge::* other) {
  std::vector<RoundEdges> found;
  for (const Edge& edge : edges) {
    auto at = std::ranges::find(found, edge.*other, [](const auto& each) { return each.peers[0]; });
    if (at == found.end()) at = found.insert(at, {round, {edge.*other}, {}});
    at->edges.push_back(edge);
  }
  return found;
}

bool same_bytes(const RoundEdges& a, const RoundEdges& b) {
  return std::ranges::equal(a.edges, b.edges, [](const Edge& x, const Edge& y) {
    return x.chunks == y.chunks && x.landing == y.landing;
  });
}

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

struct SliceOfEdge {
  std::uint32_t segment;
  Landing landing;
  int chunk;
  int slice;
};

// Returns what goes between two ranks in a round by segment, and in the order of its edges in each.
std::vector<SliceOfEdge> by_segment(const RoundEdges& round, const Slices& slices) {
  std::vector<SliceOfEdge> all;
  for (const Edge& edge : round.edges)
    for (int c = edge.chunks.first; c < edge.chunks.last; ++c)
      for (int s = 0; s < slices.of(c); ++s)
        all.push_back({static_cast<std::uint32_t>(slices.segment_of(c, s)), edge.landing, c, s});
  std::ranges::stable_sort(all, {}, &SliceOfEdge::segment);
  return all;
}

std::pair<std::uint64_t, std::uint32_t> place_of(const Frame& frame) {
  return {frame.segment + std::uint64_t{frame.round} * kLag, frame.segment};
}

// Lets only the first of all sends of a chunk finish it: a second time would divide an average
// twice and feed a residual back twice.
void finish_once(PlanFrames& frames) {
  std::vector<std::uint32_t> seen;  // by first piece, which identifies the cut unless it is empty
  for (const SendFrame& frame : frames.sends)
    for (std::uint32_t i = frame.parts.first; i < frame.parts.last; ++i) {
      Part& part = frames.parts[i];
      if (!part.finishes || part.pieces.empty()) continue;
      const auto at = std::ranges::lower_bound(seen, part.pieces.first);
      part.finishes = at == seen.end() || *at != part.pieces.first;
      if (part.finishes) seen.insert(at, part.pieces.first);
    }
}

bool is_averaged_wide(const std::vector<WideFold>& folds) {
  return !folds.empty() && folds.back().averages;
}

bool same_elements(const PlanFrames& frames, const Frame& a, const Frame& b) {
  return std::ranges::equal(view(frames.parts, a.parts), view(frames.parts, b.parts), {},
                            &Part::pieces, &Part::pieces);
}

bool only_folds(const PlanFrames& frames, const Frame& frame) {
  return std::ranges::all_of(view(frames.parts, frame.parts), [](const Part& part) {
    return part.landing == Landing::kReduce && part.wide.place == WideFold::kNone;
  });
}

// Joins sends that have the same bytes and go to peers on the same transport: their bytes are
// staged once, and in shared memory several readers read one copy.
OwnEdges own_edges(const Schedule& schedule, const Binding& binding) {
  OwnEdges own;
  for (std::size_t r = 0; r < schedule.rounds.size(); ++r) {
    const auto& round = schedule.rounds[r];
    const auto number = static_cast<int>(r);
    auto sends = by_peer(number, sends_of(round, binding.rank), &Edge::dst);
    auto receives = by_peer(number, receives_of(round, binding.rank), &Edge::src);
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

// Returns the elements between two possible cuts: whole cache lines, so that no two segments share
// one, and whole units of the codec, so that its bits do not depend on the cuts.
std::size_t cut_unit(const Binding& binding) {
  const std::size_t line = kCacheLine / size_of(binding.spec.dtype);
  return binding.is_lossy() ? round_up(line, binding.codec->unit()) : line;
}

ChunkLayout layout_of(const Schedule& schedule, const Binding& binding) {
  const Collective collective = schedule.collective;
  const bool in_place = collective == Collective::kAllReduce || collective == Collective::kReduce ||
                        collective == Collective::kBroadcast;
  return {binding.counts, schedule.chunks, cut_unit(binding), /*chunks_are_extents=*/!in_place};
}

Slices slices_of(const Schedule& schedule, const Binding& binding, const ChunkLayout& layout,
                 const OwnEdges& edges) {
  const std::size_t room = binding.max_message - sizeof(FrameHeader);
  if (binding.uniform_segments)
    return Slices::even(
        schedule, layout, [&](const Piece& piece) { return payload_of(binding, piece); }, room,
        binding.segment_bytes);
  require_one_block_a_frame(schedule, edges);
  return Slices::by_chunk(schedule.chunks, layout,
                          room / (cut_unit(binding) * size_of(binding.spec.dtype)));
}

Cuts cut(const Schedule& schedule, const ChunkLayout& layout, const Slices& slices) {
  Cuts cuts;
  for (int c = 0; c < schedule.chunks; ++c)
    for (int s = 0; s < slices.most(); ++s) {
      const auto first = size32(cuts.pieces);
      if (s < slices.of(c)) layout.append(c, s, slices.of(c), cuts.pieces);
      cuts.slices.push_back({first, size32(cuts.pieces)});
    }
  return cuts;
}

// Places each finished chunk's payload at a cache line. All ranks must decode the same bytes, so
// nobody encodes a finished chunk twice.
Store place_store(const Binding& binding, const Slices& slices, const Cuts& cuts,
                  const FinishedRounds& finished) {
  Store store;
  store.places.assign(cuts.slices.size(), kNotStored);
  if (!binding.is_lossy()) return store;
  for (std::size_t i = 0; i < cuts.slices.size(); ++i) {
    if (finished.leaves[i / at(slices.most())] == FinishedRounds::kNever) continue;
    store.places[i] = size32(store.offsets);
    store.offsets.push_back(store.bytes);
    store.bytes += round_up(payload_of(binding, cuts, cuts.slices[i]), kCacheLine);
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
PlanFrames frames_of(const Binding& binding, const OwnEdges& edges, const Slices& slices,
                     const Cuts& cuts, const Store& store, const FinishedRounds& finished,
                     const ChunkFolds& folds) {
  PlanFrames all;
  const auto part_of = [&](const SliceOfEdge& each, bool sends) {
    const std::size_t i = slices.index(each.chunk, each.slice);
    const bool finishes =
        sends && finished.starts_here(at(each.chunk)) && !is_averaged_wide(folds[at(each.chunk)]);
    Part part{cuts.slices[i], each.chunk, each.landing};
    if (each.landing != Landing::kCopy) return part;
    part.finishes = finishes;
    part.stored = store.places[i];
    return part;
  };
  const auto emit = [&](const RoundEdges& round, auto& frames, bool sends) {
    const auto first_peer = size32(all.peers);
    all.peers.insert(all.peers.end(), round.peers.begin(), round.peers.end());
    const std::size_t first = frames.size();
    for (const SliceOfEdge& each : by_segment(round, slices)) {
      if (frames.size() == first || frames.back().segment != each.segment) {
        Frame& frame = frames.emplace_back();
        frame.segment = each.segment;
        frame.round = static_cast<std::uint16_t>(round.round);
        frame.peers = {first_peer, size32(all.peers)};
        frame.parts = {size32(all.parts), size32(all.parts)};
      }
      const Part& part = all.parts.emplace_back(part_of(each, sends));
      frames.back().bytes += payload_of(binding, cuts, part.pieces);
      frames.back().parts.last = size32(all.parts);
    }
    for (std::size_t i = first; i < frames.size(); ++i)
      frames[i].segments = static_cast<std::uint32_t>(frames.size() - first);
  };
  for (const RoundEdges& each : edges.receives) emit(each, all.receives, /*sends=*/false);
  for (const RoundEdges& each : edges.sends) emit(each, all.sends, /*sends=*/true);
  // Stably: frames of one round keep the schedule's order, in which reductions fold, since another
  // order would give other last bits.
  std::ranges::stable_sort(all.receives, {}, place_of);
  std::ranges::stable_sort(all.sends, {}, place_of);
  finish_once(all);
  return all;
}

// Places the sums of 16-bit floats.
PlanFrames with_wide_sums(PlanFrames frames, const Slices& slices, const Cuts& cuts,
                          const ChunkFolds& folds) {
  std::vector<std::size_t> seen(cuts.slices.size(), 0);  // addends so far
  std::vector<std::uint32_t> place_of(cuts.slices.size(), 0);
  WidePlaces places;
  std::size_t most = 0;  // elements of a sum
  for (const ReceiveFrame& frame : frames.receives)
    for (std::uint32_t i = frame.parts.first; i < frame.parts.last; ++i) {
      Part& part = frames.parts[i];
      const auto& its_folds = folds[at(part.chunk)];
      if (part.landing != Landing::kReduce || its_folds.empty()) continue;
      const std::size_t cut =
          slices.index(part.chunk, slices.in_segment(part.chunk, frame.segment));
      part.wide = its_folds[seen[cut]++];
      if (part.wide.place == WideFold::kNone) continue;
      if (part.wide.begins) place_of[cut] = places.take();
      part.wide.place = place_of[cut];
      if (part.wide.ends) places.give_back(place_of[cut]);
      std::size_t elements = 0;
      for (const Piece& piece : view(cuts.pieces, part.pieces)) elements += piece.count;
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
std::vector<Piece> results_of_own(const Schedule& schedule, const Binding& binding,
                                  const ChunkLayout& layout, const FinishedRounds& finished,
                                  const ChunkFolds& folds) {
  std::vector<Piece> found;
  if (binding.folds || (binding.divisor(schedule.ranks) == 1 && !binding.is_lossy())) return found;
  for (std::size_t c = 0; c < folds.size(); ++c)
    if (holds_result(schedule, binding.rank, c) && !finished.travels(c) &&
        !is_averaged_wide(folds[c]))
      layout.append(static_cast<int>(c), 0, 1, found);
  return found;
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
  const Slices slices = slices_of(schedule, binding_, layout, edges);
  Cuts cuts = cut(schedule, layout, slices);
  Store store = place_store(binding_, slices, cuts, finished);
  PlanFrames frames = frames_of(binding_, edges, slices, cuts, store, finished, folds);
  frames = with_wide_sums(std::move(frames), slices, cuts, folds);
  frames = with_waits(std::move(frames), slices.segments());
  frames_ = with_addends(std::move(frames), binding_);
  segments_ = slices.segments();
  pieces_ = std::move(cuts.pieces);
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
