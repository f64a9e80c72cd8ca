// Makes plans. No rank tells another which frames it will send, so everything on which both ends of
// a message must agree (segments, cuts, order) is computed from what both know.
#include "gradwire/exec/plan/plan.h"

#include <algorithm>
#include <limits>
#include <string>

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

std::size_t at(int i) { return static_cast<std::size_t>(i); }

bool chunks_are_extents(Collective collective) {
  return collective != Collective::kAllReduce && collective != Collective::kReduce &&
         collective != Collective::kBroadcast;
}

// All edges of one round between the same two ranks.
struct Message {
  int round = 0;
  std::vector<Rank> peers;  // the other end; several for a send that several ranks read
  std::vector<Edge> edges;

  bool same_bytes(const Message& other) const {
    return std::equal(edges.begin(), edges.end(), other.edges.begin(), other.edges.end(),
                      [](const Edge& a, const Edge& b) {
                        return a.chunks == b.chunks && a.landing == b.landing;
                      });
  }
};

std::vector<Message> messages_of(int round, const std::vector<Edge>& edges, Rank Edge::* other) {
  std::vector<Message> messages;
  for (const Edge& edge : edges) {
    auto at = std::find_if(messages.begin(), messages.end(),
                           [&](const Message& m) { return m.peers[0] == edge.*other; });
    if (at == messages.end()) at = messages.insert(at, {round, {edge.*other}, {}});
    at->edges.push_back(edge);
  }
  return messages;
}

// Joins messages that have the same bytes and go to peers on the same transport: their bytes are
// staged once, and in shared memory several readers read one copy.
std::vector<Message> share_staging(std::vector<Message> messages, const std::vector<int>& link_of) {
  std::vector<Message> shared;
  auto link = [&](Rank peer) {
    return link_of.empty() ? 0 : link_of[static_cast<std::size_t>(peer)];
  };
  for (Message& message : messages) {
    auto at = std::find_if(shared.begin(), shared.end(), [&](const Message& m) {
      return m.same_bytes(message) && link(m.peers[0]) == link(message.peers[0]);
    });
    if (at == shared.end())
      shared.push_back(std::move(message));
    else
      at->peers.push_back(message.peers[0]);
  }
  return shared;
}

}  // namespace

class Plan::Builder {
 public:
  Builder(Plan& plan, const Schedule& schedule)
      : plan_(plan),
        schedule_(schedule),
        spec_(plan.binding_.spec),
        codec_(*plan.binding_.codec),
        layout_(plan.binding_.counts, schedule.chunks, unit(),
                chunks_are_extents(schedule.collective)) {}

  void make() {
    collect_messages();
    mark_finished_chunks();
    cut_chunks();
    place_store();
    find_wide_folds();
    emit_frames();
    place_wide_sums();
    link_needs();
    find_addends();
    list_finished_here();
  }

 private:
  // Returns the elements between two possible cuts: whole cache lines, so that no two segments
  // share one, and whole units of the codec, so that its bits do not depend on the cuts.
  std::size_t unit() const {
    const std::size_t line = 64 / size_of(spec_.dtype);
    if (!plan_.lossy()) return line;
    return codec_.unit() * ((line + codec_.unit() - 1) / codec_.unit());
  }

  std::size_t payload(const Piece& piece) const {
    return plan_.lossy() ? codec_.max_bytes(piece.count) : piece.count * size_of(spec_.dtype);
  }

  void collect_messages() {
    for (std::size_t r = 0; r < schedule_.rounds.size(); ++r) {
      const auto& round = schedule_.rounds[r];
      const Rank me = plan_.binding_.rank;
      auto sends = messages_of(static_cast<int>(r), sends_of(round, me), &Edge::dst);
      auto receives = messages_of(static_cast<int>(r), receives_of(round, me), &Edge::src);
      sends = share_staging(std::move(sends), plan_.binding_.link_of);
      std::move(sends.begin(), sends.end(), std::back_inserter(sends_));
      std::move(receives.begin(), receives.end(), std::back_inserter(receives_));
    }
  }

  // Marks the rounds in which chunks travel finished. In in-tree schedules finished values travel
  // along copy edges: the first rank to send one finishes it, all others receive it.
  void mark_finished_chunks() {
    const auto chunks = static_cast<std::size_t>(schedule_.chunks);
    arrives_finished_.assign(chunks, kNever);
    leaves_finished_.assign(chunks, kNever);
    if (!plan_.binding_.in_tree || !reduces(schedule_.collective)) return;
    auto mark = [](const std::vector<Message>& messages, std::vector<int>& first_round) {
      for (const Message& message : messages)
        for (const Edge& edge : message.edges)
          if (edge.landing == Landing::kCopy)
            for (int c = edge.chunks.first; c < edge.chunks.last; ++c) {
              int& first = first_round[static_cast<std::size_t>(c)];
              first = std::min(first, message.round);
            }
    };
    mark(receives_, arrives_finished_);
    mark(sends_, leaves_finished_);
  }

  void cut_chunks() {
    const std::size_t room = plan_.binding_.max_message - sizeof(FrameHeader);
    if (plan_.binding_.uniform_segments) {
      slices_ = Slices::even(
          schedule_, layout_, [this](const Piece& piece) { return payload(piece); }, room,
          plan_.binding_.segment_bytes);
    } else {
      slices_ = Slices::by_chunk(schedule_.chunks, layout_, room / (unit() * size_of(spec_.dtype)));
      require_one_block_a_message();
    }
    plan_.segments_ = slices_.segments();
    for (int c = 0; c < schedule_.chunks; ++c)
      for (int s = 0; s < slices_.most(); ++s) {
        const auto first = size32(plan_.pieces_);
        if (s < slices_.of(c)) layout_.append(c, s, slices_.of(c), plan_.pieces_);
        cuts_.push_back({first, size32(plan_.pieces_)});
      }
  }

  void require_one_block_a_message() const {
    for (const auto* messages : {&sends_, &receives_})
      for (const Message& message : *messages)
        if (message.edges.size() > 1 || message.edges[0].chunks.size() > 1)
          throw ScheduleError("schedule '" + schedule_.name + "' sends several blocks of " +
                              std::string(name_of(schedule_.collective)) +
                              " in one message of round " + std::to_string(message.round) +
                              "; send each in a round of its own");
  }

  std::size_t cut_bytes(const Range& range) const {
    std::size_t bytes = 0;
    for (const Piece& piece : view(plan_.pieces_, range)) bytes += payload(piece);
    return bytes;
  }

  // Places the payload of every finished chunk that this rank sends or forwards in the store: all
  // ranks must decode the same bytes, so nobody encodes a finished chunk twice. Each place begins
  // at a cache line.
  void place_store() {
    stored_.assign(cuts_.size(), kNotStored);
    if (!plan_.lossy()) return;
    for (std::size_t i = 0; i < cuts_.size(); ++i) {
      if (leaves_finished_[i / at(slices_.most())] == kNever) continue;
      stored_[i] = size32(plan_.store_offsets_);
      plan_.store_offsets_.push_back(plan_.store_bytes_);
      plan_.store_bytes_ += (cut_bytes(cuts_[i]) + 63) / 64 * 64;
    }
  }

  void emit_frames() {
    for (const Message& message : receives_) emit(message, plan_.receives_, /*sends=*/false);
    for (const Message& message : sends_) emit(message, plan_.sends_, /*sends=*/true);
    sort(plan_.receives_);
    sort(plan_.sends_);
    mark_first_finished_send();
  }

  void emit(const Message& message, std::vector<Frame>& frames, bool sends) {
    const auto first_peer = size32(plan_.peers_);
    plan_.peers_.insert(plan_.peers_.end(), message.peers.begin(), message.peers.end());
    const std::size_t first_frame = frames.size();
    for (const Slice& slice : slices_by_segment(message)) {
      const bool same = frames.size() > first_frame && frames.back().segment == slice.segment;
      if (!same) {
        Frame& frame = frames.emplace_back();
        frame.segment = slice.segment;
        frame.round = static_cast<std::uint16_t>(message.round);
        frame.peers = {first_peer, size32(plan_.peers_)};
        frame.parts = {size32(plan_.parts_), size32(plan_.parts_)};
      }
      add_part(slice, sends, frames.back());
    }
    for (std::size_t i = first_frame; i < frames.size(); ++i)
      frames[i].segments = static_cast<std::uint32_t>(frames.size() - first_frame);
  }

  struct Slice {
    std::uint32_t segment;
    const Edge* edge;
    int chunk;
    int number;
  };
  // Returns the slices of a message by segment, and in the order of its edges in each.
  std::vector<Slice> slices_by_segment(const Message& message) const {
    std::vector<Slice> slices;
    for (const Edge& edge : message.edges)
      for (int c = edge.chunks.first; c < edge.chunks.last; ++c)
        for (int s = 0; s < slices_.of(c); ++s)
          slices.push_back({static_cast<std::uint32_t>(slices_.segment_of(c, s)), &edge, c, s});
    std::ranges::stable_sort(slices, {}, &Slice::segment);
    return slices;
  }

  void add_part(const Slice& slice, bool sends, Frame& frame) {
    const std::size_t cut = slices_.index(slice.chunk, slice.number), c = at(slice.chunk);
    const bool copies = slice.edge->landing == Landing::kCopy;
    Part part;
    part.pieces = cuts_[cut];
    part.landing = slice.edge->landing;
    if (copies) part.stored = stored_[cut];
    part.finishes = sends && copies && leaves_finished_[c] != kNever &&
                    leaves_finished_[c] <= arrives_finished_[c];
    if (is_averaged_wide(slice.chunk)) part.finishes = false;
    frame.bytes += cut_bytes(part.pieces);
    plan_.parts_.push_back(part);
    frame.parts.last = size32(plan_.parts_);
    chunk_of_part_.push_back(slice.chunk);
  }

  // ---- Sums of 16-bit floats ----

  void find_wide_folds() {
    wide_folds_.resize(static_cast<std::size_t>(schedule_.chunks));
    if (plan_.lossy() || !reduces(spec_.collective)) return;
    if (codec::wide_kernels(spec_.dtype, spec_.op) == nullptr) return;
    std::vector<ChunkRounds> rounds(wide_folds_.size());
    note_rounds(receives_, Landing::kReduce, rounds, &ChunkRounds::added);
    note_rounds(receives_, Landing::kCopy, rounds, &ChunkRounds::replaced);
    note_rounds(sends_, Landing::kReduce, rounds, &ChunkRounds::sent);
    note_rounds(sends_, Landing::kCopy, rounds, &ChunkRounds::sent);
    for (int c = 0; c < schedule_.chunks; ++c) {
      const auto i = static_cast<std::size_t>(c);
      wide_folds_[i] = wide_folds(rounds[i], plan_.divisor_ > 1 && finishes(c));
    }
  }

  // Records, for each chunk, the rounds in which it is in an edge of that landing.
  static void note_rounds(const std::vector<Message>& messages, Landing landing,
                          std::vector<ChunkRounds>& rounds, std::vector<int> ChunkRounds::* of) {
    for (const Message& message : messages)
      for (const Edge& edge : message.edges)
        if (edge.landing == landing)
          for (int c = edge.chunks.first; c < edge.chunks.last; ++c)
            (rounds[static_cast<std::size_t>(c)].*of).push_back(message.round);
  }

  // Returns, for in-tree schedules, whether this rank is the first to have a chunk's whole sum.
  bool finishes(int chunk) const {
    const auto i = static_cast<std::size_t>(chunk);
    if (!plan_.binding_.in_tree) return false;
    if (leaves_finished_[i] != kNever) return leaves_finished_[i] <= arrives_finished_[i];
    return arrives_finished_[i] == kNever && holds_result(chunk);
  }

  bool is_averaged_wide(int chunk) const {
    const auto& folds = wide_folds_[static_cast<std::size_t>(chunk)];
    return !folds.empty() && folds.back().averages;
  }

  void place_wide_sums() {
    std::vector<std::size_t> seen(cuts_.size(), 0);  // addends so far, by cut
    std::vector<std::uint32_t> place_of(cuts_.size(), 0);
    WidePlaces places;
    for (const Frame& frame : plan_.receives_)
      for (std::uint32_t i = frame.parts.first; i < frame.parts.last; ++i) {
        Part& part = plan_.parts_[i];
        const int chunk = chunk_of_part_[i];
        const auto& folds = wide_folds_[static_cast<std::size_t>(chunk)];
        if (part.landing != Landing::kReduce || folds.empty()) continue;
        const std::size_t cut = slices_.index(chunk, slices_.in_segment(chunk, frame.segment));
        part.wide = folds[seen[cut]++];
        if (part.wide.place == WideFold::kNone) continue;
        if (part.wide.begins) place_of[cut] = places.take();
        part.wide.place = place_of[cut];
        if (part.wide.ends) places.give_back(place_of[cut]);
        plan_.wide_elements_ = std::max(plan_.wide_elements_, cut_elements(part.pieces));
      }
    plan_.wide_elements_ = (plan_.wide_elements_ + 15) / 16 * 16;  // whole cache lines
    plan_.wide_places_ = places.most();
  }

  std::size_t cut_elements(const Range& range) const {
    std::size_t elements = 0;
    for (const Piece& piece : view(plan_.pieces_, range)) elements += piece.count;
    return elements;
  }

  std::pair<std::uint64_t, std::uint32_t> place(const Frame& frame) const {
    return {frame.segment + std::uint64_t{frame.round} * kLag, frame.segment};
  }

  // Sorts stably: messages of one round keep the schedule's order, in which reductions fold, since
  // another order would give other last bits.
  void sort(std::vector<Frame>& frames) const {
    std::stable_sort(frames.begin(), frames.end(),
                     [this](const Frame& a, const Frame& b) { return place(a) < place(b); });
  }

  // Lets only the first of all sends of a chunk finish it: a second time would divide an average
  // twice and feed a residual back twice.
  void mark_first_finished_send() {
    std::vector<std::uint32_t> seen;  // by first piece, which identifies the cut unless it is empty
    for (const Frame& frame : plan_.sends_) {
      for (std::uint32_t i = frame.parts.first; i < frame.parts.last; ++i) {
        Part& part = plan_.parts_[i];
        if (!part.finishes || part.pieces.first == part.pieces.last) continue;
        auto at = std::lower_bound(seen.begin(), seen.end(), part.pieces.first);
        part.finishes = at == seen.end() || *at != part.pieces.first;
        if (part.finishes) seen.insert(at, part.pieces.first);
      }
    }
  }

  // Finds what each frame needs, by a walk over both lists in the one order that all ranks share.
  // What a frame waits for comes earlier in it, in the same segment, so the ranks cannot wait for
  // each other in a circle. A send waits for what landed in the rounds before; a receive waits for
  // the sends of its own round, which read the buffer as it was when the round began.
  void link_needs() {
    const auto segments = static_cast<std::size_t>(plan_.segments_);
    std::vector<std::uint32_t> landed(segments, 0), staged(segments, 0);
    std::size_t r = 0;
    for (std::size_t s = 0; s < plan_.sends_.size(); ++s) {
      Frame& send = plan_.sends_[s];
      for (; r < plan_.receives_.size() && place(plan_.receives_[r]) < place(send); ++r)
        note_receive(r, landed, staged);
      send.needs = landed[send.segment];
      staged[send.segment] = static_cast<std::uint32_t>(s + 1);
    }
    for (; r < plan_.receives_.size(); ++r) note_receive(r, landed, staged);
  }

  void note_receive(std::size_t r, std::vector<std::uint32_t>& landed,
                    const std::vector<std::uint32_t>& staged) {
    Frame& receive = plan_.receives_[r];
    receive.needs = staged[receive.segment];
    landed[receive.segment] = static_cast<std::uint32_t>(r + 1);
  }

  // ---- Frames that are landed together ----

  // Counts from the last receive back, so that each frame knows how many frames from it on add to
  // the same elements. The execution adds all that have arrived in one pass over the memory.
  void find_addends() {
    for (std::size_t r = plan_.receives_.size(); r-- > 0;) {
      Frame& frame = plan_.receives_[r];
      if (!only_folds(frame)) continue;
      const bool last = r + 1 == plan_.receives_.size();
      const Frame* next = last ? nullptr : &plan_.receives_[r + 1];
      const bool more = next != nullptr && next->addends > 0 && next->round == frame.round &&
                        next->segment == frame.segment && same_elements(frame, *next);
      frame.addends = more ? next->addends + 1 : 1;
      plan_.most_addends_ = std::max<std::size_t>(plan_.most_addends_, frame.addends);
    }
    for (Frame& send : plan_.sends_) {
      if (send.needs == 0) continue;
      const Frame& last = plan_.receives_[send.needs - 1];
      send.addends = last.addends == 1 && same_elements(send, last) ? 1 : 0;
    }
  }

  bool only_folds(const Frame& frame) const {
    return !plan_.lossy() && std::ranges::all_of(plan_.parts(frame), [](const Part& part) {
      return part.landing == Landing::kReduce && part.wide.place == WideFold::kNone;
    });
  }

  bool same_elements(const Frame& a, const Frame& b) const {
    return std::ranges::equal(plan_.parts(a), plan_.parts(b), [](const Part& x, const Part& y) {
      return x.pieces.first == y.pieces.first && x.pieces.last == y.pieces.last;
    });
  }

  bool holds_result(int chunk) const {
    switch (schedule_.collective) {
      case Collective::kReduce:
        return plan_.binding_.rank == schedule_.root;
      case Collective::kReduceScatter:
        return plan_.binding_.rank == chunk;
      default:
        return true;
    }
  }

  // Lists results that no send finishes, since only this rank has them (reduce, or a single rank).
  // The execution finishes them when everything has landed.
  void list_finished_here() {
    if (plan_.folds() || (plan_.divisor_ == 1 && !plan_.lossy())) return;
    for (int c = 0; c < schedule_.chunks; ++c) {
      const auto i = static_cast<std::size_t>(c);
      const int first = std::min(arrives_finished_[i], leaves_finished_[i]);
      if (!holds_result(c) || first != kNever || is_averaged_wide(c)) continue;
      layout_.append(c, 0, 1, plan_.finished_here_);
    }
  }

  template <typename T>
  static std::uint32_t size32(const std::vector<T>& values) {
    return static_cast<std::uint32_t>(values.size());
  }

  Plan& plan_;
  const Schedule& schedule_;
  const OpSpec& spec_;
  const codec::Codec& codec_;
  ChunkLayout layout_;
  std::vector<Message> sends_, receives_;
  // By chunk: the first round in which it arrives, or leaves, finished. A chunk may come back to
  // the rank that finished it.
  static constexpr int kNever = std::numeric_limits<int>::max();
  std::vector<int> arrives_finished_, leaves_finished_;
  Slices slices_;
  std::vector<Range> cuts_;                        // by chunk, then slice
  std::vector<std::uint32_t> stored_;              // likewise
  std::vector<std::vector<WideFold>> wide_folds_;  // by chunk, for its addends in order
  std::vector<int> chunk_of_part_;
};

// In these collectives every rank's result holds data of every rank, and each frame was checked.
bool Plan::confirms_all_ranks() const noexcept {
  const Collective collective = spec().collective;
  return collective == Collective::kAllReduce || collective == Collective::kReduceScatter ||
         collective == Collective::kAllGather;
}

std::uint64_t Plan::bytes_with(const std::vector<Frame>& frames, Rank peer) const {
  std::uint64_t bytes = 0;
  for (const Frame& frame : frames)
    if (std::ranges::find(peers(frame), peer) != peers(frame).end()) bytes += frame.bytes;
  return bytes;
}

Plan::Plan(const Schedule& schedule, Binding binding) : binding_(std::move(binding)) {
  const OpSpec& spec = binding_.spec;
  check_types(spec.collective, spec.dtype, spec.op, codec());
  if (lossy() && codec().combine() != codec::Combine::kReencode)
    throw ScheduleError("codec '" + codec().name() +
                        "' can't be added at every hop, as schedule '" + schedule.name +
                        "' does; use algorithm 'auto'");
  if (lossy() && !binding_.in_tree)
    throw ScheduleError(
        "codec '" + binding_.codec->name() + "' encodes again at every hop, which needs " +
        "a schedule in which each rank sends its part of a sum once, to one parent; '" +
        schedule.name + "' is not one; use ring, halving_doubling, a tree, star or direct");
  if (schedule.rounds.size() > std::numeric_limits<std::uint16_t>::max())
    throw ScheduleError("schedule '" + schedule.name + "' has more than 65535 rounds");
  if (reduces(spec.collective) && spec.op == ReduceOp::kAvg) divisor_ = schedule.ranks;
  fingerprint_ = spec.fingerprint();
  text_ = spec.to_string();
  Builder(*this, schedule).make();
}

}  // namespace gradwire::exec
