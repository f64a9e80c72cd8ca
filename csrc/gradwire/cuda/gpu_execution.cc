#include "gradwire/cuda/gpu_execution.h"

#include <algorithm>

#include "gradwire/base/error.h"

namespace gradwire::cuda {
namespace {

using exec::Frame;
using exec::Part;
using exec::Piece;

}  // namespace

void Execution::run(const Call& call, Messages& messages, Stream stream) {
  call_ = call;
  messages_ = &messages;
  stream_ = stream;
  reserve();
  each_round([this](Frames sends, Frames receives) { run_round(sends, receives); });
  for (const Piece& piece : call_.plan->finished_here()) finish_here(piece);
}

// Visits the frames of each round. They are in the order of their rounds, since there is one
// segment.
template <typename Visit>
void Execution::each_round(Visit visit) const {
  const Frames sends = call_.plan->sends(), receives = call_.plan->receives();
  std::size_t s = 0, r = 0;
  while (s < sends.size() || r < receives.size()) {
    const int round = std::min(s < sends.size() ? sends[s].round : 0xFFFF,
                               r < receives.size() ? receives[r].round : 0xFFFF);
    const auto end_of = [round](Frames frames, std::size_t from) {
      while (from < frames.size() && frames[from].round == round) ++from;
      return from;
    };
    const std::size_t last_s = end_of(sends, s), last_r = end_of(receives, r);
    visit(sends.subspan(s, last_s - s), receives.subspan(r, last_r - r));
    s = last_s;
    r = last_r;
  }
}

// Reserves room for the round that needs the most, and for finished payloads.
void Execution::reserve() {
  std::size_t most = 0;
  each_round([&](Frames sends, Frames receives) {
    std::size_t bytes = 0;
    for (const Frames frames : {sends, receives})
      for (const Frame& frame : frames)
        for (const Part& part : call_.plan->parts(frame)) bytes += payload_bytes(part);
    most = std::max(most, bytes);
  });
  arena_.take(most, call_.captured);
  store_offsets_.assign(call_.plan->stored_parts(), 0);
  std::vector<std::size_t>& offsets = store_offsets_;
  std::size_t end = 0;
  std::vector<bool> placed(offsets.size(), false);
  for (const auto* frames : {&call_.plan->sends(), &call_.plan->receives()})
    for (const Frame& frame : *frames)
      for (const Part& part : call_.plan->parts(frame)) {
        if (part.stored == exec::kNotStored || placed[part.stored]) continue;
        placed[part.stored] = true;
        offsets[part.stored] = end;
        end += payload_bytes(part);
      }
  store_.take(end, call_.captured);
  wide_.take(call_.plan->wide_elements() * sizeof(float), call_.captured);
}

void Execution::run_round(Frames sends, Frames receives) {
  used_ = 0;
  landings_.clear();
  messages_->begin();
  for (const Frame& frame : sends)
    for (const Part& part : call_.plan->parts(frame)) post_send(part, call_.plan->peers(frame));
  for (const Frame& frame : receives)
    for (const Part& part : call_.plan->parts(frame))
      post_receive(part, call_.plan->peers(frame)[0], sends);
  messages_->end(stream_);
  for (const Landing& landing : landings_) land(landing);
}

// ---- Sending -----------------------------------------------------------------------------------

void Execution::post_send(const Part& part, std::span<const Rank> peers) {
  if (part.finishes) finish(part);
  if (lossy()) return send(payload_to_send(part), payload_bytes(part), peers, layout_of(part));
  for (const Piece& piece : call_.plan->pieces(part))
    send(address(piece), bytes_of(piece), peers, call_.layout);
}

void Execution::send(const std::byte* data, std::size_t bytes, std::span<const Rank> peers,
                     std::span<const Slotted> layout) {
  for (Rank peer : peers) messages_->send(data, bytes, peer, layout);
  sent_ += bytes * peers.size();
}

const std::byte* Execution::payload_to_send(const Part& part) {
  if (part.stored != exec::kNotStored) return stored(part);
  std::byte* const payload = take(payload_bytes(part));
  std::byte* out = payload;
  for (const Piece& piece : call_.plan->pieces(part)) {
    call_.codec->encode(run_of(piece), out, call_.scratch, stream_);
    out += call_.codec->payload_bytes(piece.count);
  }
  return payload;
}

// Finishes a sum that this rank owns: from here on all ranks, this one included, have the same
// bits.
void Execution::finish(const Part& part) {
  if (part.stored == exec::kNotStored) {
    for (const Piece& piece : call_.plan->pieces(part)) scale(piece);
    return;
  }
  std::byte* out = stored(part);
  for (const Piece& piece : call_.plan->pieces(part)) {
    call_.codec->finish(run_of(piece), out, call_.scratch, floats(piece),
                        static_cast<float>(1.0 / call_.plan->divisor()), call_.flags, stream_);
    out += call_.codec->payload_bytes(piece.count);
  }
}

// ---- Landing -----------------------------------------------------------------------------------

void Execution::post_receive(const Part& part, Rank peer, Frames sends) {
  if (lossy()) {
    const bool keeps = part.stored != exec::kNotStored;
    std::byte* const data = keeps ? stored(part) : take(payload_bytes(part));
    messages_->receive(data, payload_bytes(part), peer, layout_of(part));
    landings_.push_back({&part, nullptr, data});
    return;
  }
  const bool at_once = part.landing == schedule::Landing::kCopy && !is_sent(part, sends);
  for (const Piece& piece : call_.plan->pieces(part)) {
    std::byte* const data = at_once ? address(piece) : take(aligned(bytes_of(piece)));
    messages_->receive(data, bytes_of(piece), peer, call_.layout);
    if (!at_once) landings_.push_back({&part, &piece, data});
  }
}

// Returns whether elements of the part are also sent in this round, as they were before it.
bool Execution::is_sent(const Part& part, Frames sends) const {
  for (const Frame& frame : sends)
    for (const Part& sent : call_.plan->parts(frame))
      if (sent.pieces.first < part.pieces.last && part.pieces.first < sent.pieces.last) return true;
  return false;
}

void Execution::land(const Landing& landing) {
  if (landing.piece != nullptr)
    land_plain(*landing.part, *landing.piece, landing.data);
  else
    land_lossy(*landing.part, landing.data);
}

// Folds 16-bit floats in float32. The sum is rounded with the last addend.
void Execution::fold_wide(const Part& part, const Piece& piece, const std::byte* data) {
  const exec::Plan& plan = *call_.plan;
  float* sum = reinterpret_cast<float*>(wide_.data()) + plan.wide_offset(part.wide);
  for (const Piece& each : plan.pieces(part)) {
    if (&each == &piece) break;
    sum += each.count;
  }
  check(api_,
        api_.fold_wide(static_cast<int>(plan.spec().dtype), static_cast<int>(plan.spec().op),
                       part.wide.begins ? address(piece) : nullptr, sum, data,
                       part.wide.ends ? address(piece) : nullptr,
                       part.wide.averages ? plan.divisor() : 1, piece.count, stream_),
        "folding");
}

void Execution::land_plain(const Part& part, const Piece& piece, const std::byte* data) {
  if (part.wide.place != exec::WideFold::kNone) return fold_wide(part, piece, data);
  const OpSpec& spec = call_.plan->spec();
  if (part.landing == schedule::Landing::kCopy)
    check(api_, api_.copy(address(piece), data, bytes_of(piece), CopyKind::kOnDevice, stream_),
          "cudaMemcpyAsync");
  else
    check(api_,
          api_.fold(static_cast<int>(spec.dtype), static_cast<int>(spec.op), address(piece), data,
                    piece.count, stream_),
          "folding");
}

void Execution::land_lossy(const Part& part, const std::byte* data) {
  const bool adds = part.landing == schedule::Landing::kReduce;
  for (const Piece& piece : call_.plan->pieces(part)) {
    call_.codec->decode(data, floats(piece), piece.count, adds, call_.flags, stream_);
    if (!adds) scale(piece);
    data += call_.codec->payload_bytes(piece.count);
  }
}

// Finishes a result that only this rank has, and never encoded: all of the residual is delivered.
void Execution::finish_here(const Piece& piece) {
  if (lossy()) {
    const Run run = run_of(piece);
    if (run.run_feedback.residual[0] != nullptr)
      check(api_, api_.deliver(run.run_feedback, floats(piece), piece.count, stream_),
            "delivering");
    check(api_,
          api_.mark(floats(piece), piece.count, call_.plan->codec().unit(), call_.flags, stream_),
          "marking");
  }
  scale(piece);
}

void Execution::scale(const Piece& piece) {
  const int divisor = call_.plan->divisor();
  if (divisor == 1) return;
  check(api_,
        api_.average(static_cast<int>(call_.plan->spec().dtype), address(piece), divisor,
                     piece.count, stream_),
        "averaging");
}

// ---- Places ------------------------------------------------------------------------------------

std::size_t Execution::payload_bytes(const Part& part) const {
  std::size_t bytes = 0;
  for (const Piece& piece : call_.plan->pieces(part))
    bytes += lossy() ? call_.codec->payload_bytes(piece.count) : aligned(bytes_of(piece));
  return bytes;
}

std::span<const Slotted> Execution::layout_of(const Part& part) {
  layout_.clear();
  if (call_.codec->slot_bytes() > 0)
    for (const Piece& piece : call_.plan->pieces(part))
      layout_.push_back(call_.codec->layout(piece.count));
  return layout_;
}

std::byte* Execution::take(std::size_t bytes) {
  std::byte* const data = arena_.data() + used_;
  used_ += bytes;
  return data;
}

Run Execution::run_of(const Piece& piece) const {
  const ExtentFeedback& of = call_.extent_feedback[piece.extent];
  Run run;
  run.x = floats(piece);
  run.n = piece.count;
  run.run_feedback = of.run_feedback;
  for (float*& each : run.run_feedback.residual)
    if (each != nullptr) each += piece.offset;
  run.call = of.call;
  run.element = of.element + piece.offset;
  return run;
}

std::size_t Execution::bytes_of(const Piece& piece) const {
  return piece.count * size_of(call_.plan->spec().dtype);
}

std::byte* Execution::address(const Piece& piece) const {
  return call_.extents[piece.extent] + piece.offset * size_of(call_.plan->spec().dtype);
}

float* Execution::floats(const Piece& piece) const {
  return reinterpret_cast<float*>(call_.extents[piece.extent]) + piece.offset;
}

}  // namespace gradwire::cuda
