#include "gradwire/cuda/gpu_execution.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "gradwire/base/error.h"
#include "gradwire/codec/reduction/fold.h"

namespace gradwire::cuda {
namespace {

using exec::Chunk;
using exec::Frame;
using exec::Span;
using exec::WideFold;

constexpr std::size_t kNowhere = ~std::size_t{0};

bool is_empty(const Chunk& chunk) { return chunk.spans.first == chunk.spans.last; }
// Two chunks that are not empty are of the same elements, or of different ones.
bool same_elements(const Chunk& a, const Chunk& b) { return a.spans.first == b.spans.first; }
bool is_wide(const Chunk& chunk) { return chunk.wide.place != WideFold::kNone; }

}  // namespace

void GpuExecution::run(const GpuCall& call, Messages& messages, const CallStream& stream) {
  call_ = call;
  messages_ = &messages;
  stream_ = stream;
  arrived_.chunks.clear();
  results_.clear();
  arrived_.one_by_one = false;
  reserve();
  each_round([this](Sends sends, Receives receives) { run_round(sends, receives); });
  std::swap(pending_, arrived_);
  const bool averages = are_finished_here();
  land_pending({}, averages);
  if (lossy()) decode_results();
  finish_here(averages);
}

// Visits the frames of each round. They are in the order of their rounds, since there is one
// segment.
template <typename Visit>
void GpuExecution::each_round(Visit visit) const {
  const Sends sends = call_.plan->sends();
  const Receives receives = call_.plan->receives();
  std::size_t s = 0, r = 0;
  while (s < sends.size() || r < receives.size()) {
    const int round = std::min(s < sends.size() ? sends[s].round : 0xFFFF,
                               r < receives.size() ? receives[r].round : 0xFFFF);
    const auto end_of = [round](const auto& frames, std::size_t from) {
      while (from < frames.size() && frames[from].round == round) ++from;
      return from;
    };
    const std::size_t last_s = end_of(sends, s), last_r = end_of(receives, r);
    visit(sends.subspan(s, last_s - s), receives.subspan(r, last_r - r));
    s = last_s;
    r = last_r;
  }
}

// Reserves room for the two rounds that need the most, and for finished payloads.
void GpuExecution::reserve() {
  half_bytes_ = 0;
  each_round([&](Sends sends, Receives receives) {
    std::size_t bytes = 0;
    for (const Frame& each : sends) bytes += aligned(frame_bytes(each));
    for (const Frame& each : receives) bytes += aligned(frame_bytes(each));
    half_bytes_ = std::max(half_bytes_, bytes);
  });
  arena_.take(2 * half_bytes_, stream_);
  wide_.take(call_.plan->wide_elements() * sizeof(float), stream_);
  if (lossy()) place_store();
}

// Places the payloads of all finished chunks in the order of their elements, so that the chunks of
// a frame lie end to end, unless there are others between them.
void GpuExecution::place_store() {
  store_places_.clear();
  const auto note = [this](const auto& frames) {
    for (const Frame& frame : frames)
      for (const Chunk& chunk : call_.plan->chunks(frame)) {
        if (chunk.landing != schedule::Landing::kCopy || is_empty(chunk)) continue;
        if (chunk.spans.first >= store_places_.size())
          store_places_.resize(chunk.spans.first + 1, kNowhere);
        store_places_[chunk.spans.first] = payload_bytes(chunk);
      }
  };
  note(call_.plan->sends());
  note(call_.plan->receives());
  std::size_t end = 0;
  for (std::size_t& each : store_places_) {
    if (each == kNowhere) continue;
    const std::size_t bytes = each;
    each = end;
    end += bytes;
  }
  store_.take(end, stream_);
}

void GpuExecution::run_round(Sends sends, Receives receives) {
  std::swap(pending_, arrived_);
  arrived_.chunks.clear();
  arrived_.one_by_one = false;
  second_half_ = !second_half_;
  used_ = second_half_ ? half_bytes_ : 0;
  place_sends(sends);
  if (pending_.one_by_one) land_pending(sends, /*averages=*/false);  // encoders cannot add these
  if (lossy()) encode_sends(sends);
  land_pending(sends, /*averages=*/false);
  if (!lossy() && call_.plan->divisor() > 1) average(sends);
  pack_sends(sends);
  messages_->begin();
  for (std::size_t i = 0; i < sends.size(); ++i) send(sends[i], outgoing_[i]);
  for (const Frame& frame : receives) receive(frame, sends);
  messages_->end(stream_);
  fold({});  // copies into the store what could not be received there
}

// ---- Sending -----------------------------------------------------------------------------------

// Finds where the message of each frame lies: in place, or in the arena.
void GpuExecution::place_sends(Sends sends) {
  outgoing_.clear();
  for (const Frame& frame : sends) {
    const std::byte* place = range_of(frame);
    if (place == nullptr) place = arena_.data() + take(frame_bytes(frame));
    outgoing_.push_back(place);
  }
}

// Encodes into the arena what is not finished, and finished sums that this rank owns into the
// store: from there on all ranks, this one included, have the same bits.
void GpuExecution::encode_sends(Sends sends) {
  for (std::size_t i = 0; i < sends.size(); ++i) {
    auto at = static_cast<std::size_t>(outgoing_[i] - arena_.data());
    for (const Chunk& chunk : call_.plan->chunks(sends[i])) {
      if (is_empty(chunk)) continue;
      if (chunk.completes_sum) encode(chunk, store_places_[chunk.spans.first], {0, 0, true});
      if (chunk.store_index == exec::kNotStored) encode(chunk, at, {});
      at += payload_bytes(chunk);
    }
  }
  start_encoding();
}

// Adds a chunk to the launch, with what has arrived of it.
void GpuExecution::encode(const Chunk& chunk, std::size_t at, const Launch& alone) {
  if (is_empty(chunk)) return;
  Launch launch = alone;
  ArrivedChunk* const received = pending(chunk);
  if (received != nullptr) {
    launch.addends = received->addends;
    launch.stride = received->stride;
    received->taken = true;
  }
  if (!spans_.empty() && launch != launch_) start_encoding();
  launch_ = launch;
  std::size_t from = received == nullptr ? 0 : received->at;
  for (const Span& span : call_.plan->spans(chunk)) {
    spans_.push_back(span_of(call_, span));
    spans_.back().payload = at;
    spans_.back().received = from;
    at += call_.codec->payload_bytes(span.count);
    from += call_.codec->payload_bytes(span.count);
  }
}

void GpuExecution::start_encoding() {
  if (spans_.empty()) return;
  Encoding how;
  how.received = launch_.payloads(arena_.data());
  how.out = launch_.finishes ? store_.data() : arena_.data();
  how.finishes = launch_.finishes;
  how.factor = static_cast<float>(1.0 / call_.plan->divisor());
  call_.codec->encode(spans_, how, call_.scratch, call_.flags, stream_);
  spans_.clear();
}

// Copies frames into the arena whose chunks lie in several places, so that each is one message.
void GpuExecution::pack_sends(Sends sends) {
  for (std::size_t i = 0; i < sends.size(); ++i)
    if (range_of(sends[i]) == nullptr)
      pack(sends[i], static_cast<std::size_t>(outgoing_[i] - arena_.data()));
  fold({});
}

void GpuExecution::pack(const Frame& frame, std::size_t at) {
  std::byte* to = arena_.data() + at;
  for (const Chunk& chunk : call_.plan->chunks(frame)) {
    if (lossy()) {
      if (chunk.store_index != exec::kNotStored && !is_empty(chunk))
        folds_.push_back(
            {store_.data() + store_places_[chunk.spans.first], to, payload_bytes(chunk), 0});
      to += payload_bytes(chunk);
      continue;
    }
    for (const Span& span : call_.plan->spans(chunk)) {
      folds_.push_back({address(span), to, bytes_of(span), 0});
      to += bytes_of(span);
    }
  }
}

void GpuExecution::send(const Frame& frame, const std::byte* data) {
  const std::size_t bytes = frame_bytes(frame);
  if (bytes == 0) return;
  const auto layout = layout_of(frame);
  for (Rank peer : call_.plan->peers(frame)) messages_->send(data, bytes, peer, layout);
  sent_ += bytes * call_.plan->peers(frame).size();
}

// ---- Receiving ---------------------------------------------------------------------------------

// Posts a receive: in place for copies, and for finished payloads, unless this round sends what was
// there before; else in the arena.
void GpuExecution::receive(const Frame& frame, Sends sends) {
  const std::size_t bytes = frame_bytes(frame);
  if (bytes == 0) return;
  std::byte* place = nullptr;
  if (is_copied(frame) && (lossy() || !is_sent(frame, sends))) place = range_of(frame);
  const bool in_place = place != nullptr;
  std::size_t at = in_place ? 0 : take(bytes);
  if (!in_place) place = arena_.data() + at;
  messages_->receive(place, bytes, call_.plan->peers(frame)[0], layout_of(frame));
  for (const Chunk& chunk : call_.plan->chunks(frame)) {
    if (is_empty(chunk)) continue;
    const bool finished = lossy() && chunk.landing == schedule::Landing::kCopy;
    if (finished) results_.push_back(&chunk);
    if (finished && !in_place)
      folds_.push_back({arena_.data() + at, store_.data() + store_places_[chunk.spans.first],
                        payload_bytes(chunk), 0});
    if (!finished && !in_place) note(chunk, at);
    at += payload_bytes(chunk);
  }
}

// Notes a chunk that arrives in the arena. Addends of the same chunk are added by one launch, if
// they lie evenly there, and belong to one sum.
void GpuExecution::note(const Chunk& chunk, std::size_t at) {
  const bool adds = chunk.landing == schedule::Landing::kReduce;
  const auto before =
      std::find_if(arrived_.chunks.rbegin(), arrived_.chunks.rend(),
                   [&](const ArrivedChunk& each) { return same_elements(*each.chunk, chunk); });
  if (before == arrived_.chunks.rend())
    return arrived_.chunks.push_back({&chunk, &chunk, at, 0, adds ? 1 : 0});
  const auto count = static_cast<std::size_t>(before->addends);
  if (count == 1) before->stride = at - before->at;
  if (!adds || count == 0 || chunk.wide.begins || at != before->at + count * before->stride) {
    if (count == 1) before->stride = 0;
    arrived_.one_by_one = true;
    return arrived_.chunks.push_back({&chunk, &chunk, at, 0, adds ? 1 : 0});
  }
  before->last = &chunk;
  ++before->addends;
}

// Returns the one landing of a chunk that an encoder can add; null if there is none.
GpuExecution::ArrivedChunk* GpuExecution::pending(const Chunk& chunk) {
  if (pending_.one_by_one) return nullptr;
  const auto found = std::ranges::find_if(
      pending_.chunks, [&](const ArrivedChunk& each) { return same_elements(*each.chunk, chunk); });
  return found == pending_.chunks.end() || found->addends == 0 ? nullptr : &*found;
}

// Lands what the round before has brought, as far as no encoder has added it. `averages`: all of it
// is this rank's result.
void GpuExecution::land_pending(Sends sends, bool averages) {
  for (ArrivedChunk& each : pending_.chunks) {
    if (std::exchange(each.taken, true)) continue;
    const bool finishes = averages || (averages_with_folds() && is_finished(*each.chunk, sends));
    land(each, finishes);
    if (pending_.one_by_one) start_landing();
  }
  start_landing();
}

void GpuExecution::land(const ArrivedChunk& landing, bool averages) {
  const bool wide = is_wide(*landing.chunk);
  if (wide && !(landing.chunk->wide.begins && landing.last->wide.ends)) return fold_wide(landing);
  if (wide) averages = landing.last->wide.averages;
  const Launch launch{landing.stride, landing.addends, averages};
  if (!(spans_.empty() && folds_.empty()) && launch != launch_) start_landing();
  launch_ = launch;
  std::size_t at = landing.at;
  for (const Span& span : call_.plan->spans(*landing.chunk)) {
    if (lossy()) {
      spans_.push_back(span_of(call_, span));
      spans_.back().payload = at;
      at += call_.codec->payload_bytes(span.count);
      continue;
    }
    if (landing.addends == 0)
      folds_.push_back({arena_.data() + at, address(span), bytes_of(span), 0});
    else
      folds_.push_back({address(span), address(span), span.count, at});
    at += bytes_of(span);
  }
}

void GpuExecution::start_landing() {
  fold(launch_);
  if (spans_.empty()) return;
  const Decoding how{.payloads = launch_.payloads(arena_.data()), .adds = true};
  call_.codec->decode(spans_, how, call_.flags, stream_);
  spans_.clear();
}

// Folds 16-bit floats in float32, where other addends come in other rounds. The sum is rounded with
// the last one.
void GpuExecution::fold_wide(const ArrivedChunk& landing) {
  start_landing();
  const exec::Plan& plan = *call_.plan;
  const WideFold &first = landing.chunk->wide, &last = landing.last->wide;
  for (int j = 0; j < landing.addends; ++j) {
    const bool begins = j == 0 && first.begins, ends = j + 1 == landing.addends && last.ends;
    float* sum = reinterpret_cast<float*>(wide_.data()) + plan.wide_offset(first);
    std::size_t at = landing.at + static_cast<std::size_t>(j) * landing.stride;
    wide_spans_.clear();
    for (const Span& span : plan.spans(*landing.chunk)) {
      wide_spans_.push_back(
          {begins ? address(span) : nullptr, sum, ends ? address(span) : nullptr, span.count, at});
      sum += span.count;
      at += bytes_of(span);
    }
    check(
        api_,
        api_.fold_wide_spans(static_cast<int>(plan.spec().dtype), static_cast<int>(plan.spec().op),
                             wide_spans_.data(), static_cast<int>(wide_spans_.size()),
                             arena_.data(), ends && last.averages ? plan.divisor() : 1, stream_),
        "folding");
  }
}

// ---- Finishing ---------------------------------------------------------------------------------

// Averages finished sums to which nothing was added in the round before.
void GpuExecution::average(Sends sends) {
  for (const Frame& frame : sends)
    for (const Chunk& chunk : call_.plan->chunks(frame))
      if (chunk.completes_sum && !(averages_with_folds() && pending(chunk) != nullptr))
        for (const Span& span : call_.plan->spans(chunk))
          folds_.push_back({address(span), address(span), span.count, 0});
  fold({0, 0, true});
}

// Decodes the finished payloads, all of which are in the store by now.
void GpuExecution::decode_results() {
  spans_.clear();
  for (const Chunk* chunk : results_) {
    std::size_t at = store_places_[chunk->spans.first];
    for (const Span& span : call_.plan->spans(*chunk)) {
      spans_.push_back(span_of(call_, span));
      spans_.back().payload = at;
      at += call_.codec->payload_bytes(span.count);
    }
  }
  if (spans_.empty()) return;
  const Decoding how{.payloads = {store_.data(), 0, 1},
                     .factor = static_cast<float>(1.0 / call_.plan->divisor())};
  call_.codec->decode(spans_, how, call_.flags, stream_);
  spans_.clear();
}

// Finishes results that only this rank has, and never encoded: all of the residual is delivered.
void GpuExecution::finish_here(bool is_averaged) {
  const std::vector<Span>& spans = call_.plan->finished_here();
  if (spans.empty()) return;
  if (lossy()) {
    for (const Span& span : spans) spans_.push_back(span_of(call_, span));
    const int count = static_cast<int>(spans_.size());
    check(api_, api_.deliver_spans(spans_.data(), count, stream_), "delivering");
    check(api_,
          api_.mark_spans(spans_.data(), count, call_.plan->codec().block(), call_.flags, stream_),
          "marking");
    spans_.clear();
  }
  if (is_averaged || call_.plan->divisor() == 1) return;
  for (const Span& span : spans) folds_.push_back({address(span), address(span), span.count, 0});
  fold({0, 0, true});
}

// Folds, averages or, with neither, copies the spans that were put together.
void GpuExecution::fold(const Launch& launch) {
  if (folds_.empty()) return;
  const OpSpec& spec = call_.plan->spec();
  const bool copies = launch.addends == 0 && !launch.finishes;
  check(api_,
        api_.fold_spans(static_cast<int>(copies ? DType::kUInt8 : spec.dtype),
                        static_cast<int>(copies ? ReduceOp::kSum : spec.op), folds_.data(),
                        static_cast<int>(folds_.size()), launch.payloads(arena_.data()),
                        launch.finishes ? call_.plan->divisor() : 1, stream_),
        "folding");
  folds_.clear();
}

// Returns whether the spans that arrived last are all of those that this rank finishes for itself.
bool GpuExecution::are_finished_here() const {
  const std::vector<Span>& finished = call_.plan->finished_here();
  if (finished.empty() || !averages_with_folds()) return false;
  const auto key = [](const Span& span) { return std::tuple(span.array, span.offset); };
  std::vector<Span> landed;
  for (const ArrivedChunk& each : pending_.chunks) {
    const auto spans = call_.plan->spans(*each.chunk);
    if (each.addends == 0 || is_wide(*each.chunk)) return false;
    landed.insert(landed.end(), spans.begin(), spans.end());
  }
  std::ranges::sort(landed, {}, key);
  return landed.size() == finished.size() && std::ranges::equal(landed, finished, {}, key, key);
}

// ---- Places ------------------------------------------------------------------------------------

// Returns whether an average is part of the fold that stands last. Sums of 16-bit floats that are
// rounded alone are rounded anew when they are averaged, as on CPUs.
bool GpuExecution::averages_with_folds() const {
  return !lossy() && !pending_.one_by_one && call_.plan->divisor() > 1 &&
         codec::wide_kernels(call_.plan->spec().dtype, call_.plan->spec().op) == nullptr;
}

// Returns whether this rank finishes a pending chunk's sum when it sends that in this round.
bool GpuExecution::is_finished(const Chunk& chunk, Sends sends) {
  if (pending(chunk) == nullptr) return false;
  for (const Frame& frame : sends)
    for (const Chunk& sent : call_.plan->chunks(frame))
      if (sent.completes_sum && !is_empty(sent) && same_elements(sent, chunk)) return true;
  return false;
}

// Returns whether elements of the frame are also sent in this round, as they were before it.
bool GpuExecution::is_sent(const Frame& frame, Sends sends) const {
  for (const Chunk& chunk : call_.plan->chunks(frame))
    for (const Frame& each : sends)
      for (const Chunk& sent : call_.plan->chunks(each))
        if (sent.spans.first < chunk.spans.last && chunk.spans.first < sent.spans.last) return true;
  return false;
}

bool GpuExecution::is_copied(const Frame& frame) const {
  return std::ranges::all_of(call_.plan->chunks(frame), [](const Chunk& chunk) {
    return chunk.landing == schedule::Landing::kCopy;
  });
}

// Returns where all of a frame's bytes lie end to end, in the caller's arrays or, lossy, in the
// store; null if they do not.
std::byte* GpuExecution::range_of(const Frame& frame) const {
  std::byte *begin = nullptr, *end = nullptr;
  const auto joins = [&](std::byte* at, std::size_t bytes) {
    if (begin == nullptr) begin = end = at;
    const bool follows = at == end;
    end = at + bytes;
    return follows;
  };
  for (const Chunk& chunk : call_.plan->chunks(frame)) {
    if (is_empty(chunk)) continue;
    if (lossy()) {
      if (chunk.landing != schedule::Landing::kCopy) return nullptr;
      if (!joins(store_.data() + store_places_[chunk.spans.first], payload_bytes(chunk)))
        return nullptr;
      continue;
    }
    for (const Span& span : call_.plan->spans(chunk))
      if (span.count > 0 && !joins(address(span), bytes_of(span))) return nullptr;
  }
  return begin;
}

std::size_t GpuExecution::payload_bytes(const Chunk& chunk) const {
  std::size_t bytes = 0;
  for (const Span& span : call_.plan->spans(chunk))
    bytes += lossy() ? call_.codec->payload_bytes(span.count) : bytes_of(span);
  return bytes;
}

std::size_t GpuExecution::frame_bytes(const Frame& frame) const {
  std::size_t bytes = 0;
  for (const Chunk& chunk : call_.plan->chunks(frame)) bytes += payload_bytes(chunk);
  return bytes;
}

std::span<const Slotted> GpuExecution::layout_of(const Frame& frame) {
  layout_.clear();
  const bool slotted = lossy() && call_.codec->slot_bytes() > 0;
  if (!slotted && call_.layout.empty()) return layout_;
  for (const Chunk& chunk : call_.plan->chunks(frame))
    for (const Span& span : call_.plan->spans(chunk)) {
      if (slotted)
        layout_.push_back(call_.codec->layout(span.count));
      else
        layout_.insert(layout_.end(), call_.layout.begin(), call_.layout.end());
    }
  return layout_;
}

std::size_t GpuExecution::take(std::size_t bytes) {
  const std::size_t at = used_;
  used_ += aligned(bytes);
  return at;
}

std::size_t GpuExecution::bytes_of(const Span& span) const {
  return span.count * size_of(call_.plan->spec().dtype);
}

std::byte* GpuExecution::address(const Span& span) const {
  return call_.arrays[span.array] + span.offset * size_of(call_.plan->spec().dtype);
}

GpuSpan span_of(const GpuExecution::GpuCall& call, const Span& span) {
  GpuSpan on_gpu;
  on_gpu.x = on_gpu.y = reinterpret_cast<float*>(call.arrays[span.array]) + span.offset;
  on_gpu.n = span.count;
  if (call.array_feedback.empty()) return on_gpu;
  const ArrayFeedback& of = call.array_feedback[span.array];
  on_gpu.span_feedback = of.span_feedback;
  for (float*& each : on_gpu.span_feedback.residual)
    if (each != nullptr) each += span.offset;
  on_gpu.call = of.call;
  on_gpu.element = of.element + span.offset;
  return on_gpu;
}

}  // namespace gradwire::cuda
