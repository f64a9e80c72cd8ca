#include "gradwire/exec/execution/execution.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "gradwire/base/error.h"
#include "gradwire/codec/feedback/residuals.h"
#include "gradwire/codec/lossless.h"
#include "gradwire/codec/reduction/fold.h"
#include "gradwire/codec/simd/simd.h"
#include "gradwire/exec/control/failure.h"

namespace gradwire::exec {
namespace {

using schedule::Landing;

std::size_t index_of(DType dtype) { return static_cast<std::size_t>(dtype); }

codec::ReduceKernel fold_of(DType dtype, ReduceOp op) {
  return codec::kernels().reduce[index_of(dtype)][static_cast<std::size_t>(op)];
}

ConstBytes first(ConstBytes in, std::size_t size) {
  if (in.size() < size) throw InvalidArgument("a frame is shorter than its chunks");
  return in.first(size);
}

}  // namespace

void Execution::start(const Call& call) {
  call_ = call;
  if (call_.fingerprint == 0) call_.fingerprint = call.plan->fingerprint();
  sent_ = landed_ = 0;
  ended_ = false;
  finite_ = true;
  if (store_.size() < call.plan->store_bytes()) store_.resize(call.plan->store_bytes());
  addends_.reserve(call.plan->most_addends());
  if (call.plan->packs() && to_pack_.size() < call.plan->most_bytes()) {
    to_pack_.resize(call.plan->most_bytes());
    unpacked_.resize(call.plan->most_bytes());
  }
  if (wide_.size() < call.plan->wide_elements()) wide_.resize(call.plan->wide_elements());
  if (stored_bytes_.size() < call.plan->stored_chunks())
    stored_bytes_.resize(call.plan->stored_chunks());
}

bool Execution::advance(Links& links, TrafficCounter& traffic) {
  const bool sent = try_send(links, traffic);
  const bool received = try_receive(links, traffic);
  // Sends what a full socket did not take before, while this rank waits for others.
  return sent || received || try_end(links);
}

bool Execution::try_send(Links& links, TrafficCounter& traffic) {
  const Plan& plan = *call_.plan;
  if (sent_ == plan.sends().size()) return false;
  const SendFrame& frame = plan.sends()[sent_];
  if (landed_ < frame.after_receives) return false;
  const Bytes staging = reserve(frame, links);
  if (staging.empty()) return note_wait(plan.peers(frame)[0], /*reads=*/true);
  note_work();
  const Bytes out = staging.subspan(sizeof(FrameHeader));
  commit(frame, staging, packs_ ? stage_packed(frame, out) : Staged{stage(frame, out)}, links,
         traffic);
  return true;
}

// Returns memory for the frame; empty if there is no room now.
Bytes Execution::reserve(const Frame& frame, Links& links) {
  const Bytes staging = links.reserve(call_.plan->peers(frame), sizeof(FrameHeader) + frame.bytes);
  if (staging.empty()) return staging;
  packs_ = call_.plan->packs() && !links.in_shared_memory();
  copy_ = packs_ ? copy_cached : links.copy();
  return staging;
}

void Execution::commit(const Frame& frame, Bytes staging, Staged staged, Links& links,
                       TrafficCounter& traffic) {
  FrameHeader header = header_of(frame);
  header.length = static_cast<std::uint32_t>(staged.bytes);
  header.flags = static_cast<std::uint16_t>(header.flags | call_.requests | staged.flags);
  std::memcpy(staging.data(), &header, sizeof header);
  const std::size_t bytes = sizeof header + staged.bytes;
  links.commit(bytes);
  traffic.add(bytes, call_.plan->peers(frame).size());
  ++sent_;
  if (call_.observer != nullptr) call_.observer->sent(*call_.plan, frame, bytes, spent_);
}

bool Execution::try_receive(Links& links, TrafficCounter& traffic) {
  const Plan& plan = *call_.plan;
  if (landed_ == plan.receives().size()) return false;
  const ReceiveFrame& frame = plan.receives()[landed_];
  if (sent_ < frame.after_sends) return false;
  if (frame.addends > 0) return try_fold(links, traffic);
  const auto payload = arrived(frame, links);
  const Rank peer = plan.peers(frame)[0];
  if (!payload) return note_wait(peer, /*reads=*/false);
  note_work();
  land(frame, *payload, peer);
  links.release(peer);
  ++landed_;
  if (call_.observer != nullptr)
    call_.observer->received(plan, {&frame, 1}, arrived_bytes_, spent_);
  return true;
}

// Returns the payload of the next frame from its rank, as the plan has it, if it has arrived. It
// stays until the next call, or until the rank's message is released.
std::optional<ConstBytes> Execution::arrived(const Frame& frame, Links& links) {
  const Rank peer = call_.plan->peers(frame)[0];
  const auto message = links.peek(peer);
  if (!message) return std::nullopt;
  FrameHeader header;
  if (message->size() < sizeof header)
    throw TransportError(name_of(peer) + " sent a frame without a header", peer);
  std::memcpy(&header, message->data(), sizeof header);
  const ConstBytes payload = message->subspan(sizeof header);
  check(header, frame, peer, payload);
  arrived_bytes_ = message->size();
  return (header.flags & kFramePacked) != 0 ? unpacked(frame, payload, peer) : payload;
}

ConstBytes Execution::unpacked(const Frame& frame, ConstBytes packed, Rank peer) try {
  const Stopwatch stopwatch(spent_.decode);
  const Bytes plain = Bytes(unpacked_).first(frame.bytes);
  codec::unpack(packed, plain);
  return plain;
} catch (const InvalidArgument& error) {
  throw undecodable(peer, error);
}

// Lands those frames that have arrived of those that add to the same elements. With the last of
// them their sum is staged, if that is what this rank sends next.
bool Execution::try_fold(Links& links, TrafficCounter& traffic) {
  const Plan& plan = *call_.plan;
  const auto frames = std::span(plan.receives()).subspan(landed_);
  addends_.clear();
  const std::size_t most = plan.packs() ? 1 : frames[0].addends;  // there is one unpacked_
  while (addends_.size() < most) {
    const auto payload = arrived(frames[addends_.size()], links);
    if (!payload) break;
    addends_.push_back(payload->data());
  }
  if (addends_.empty()) return note_wait(plan.peers(frames[0])[0], /*reads=*/false);
  note_work();
  const bool all = addends_.size() == frames[0].addends;
  const SendFrame* const send = all ? send_of_sum(landed_ + addends_.size()) : nullptr;
  Bytes staging = send != nullptr ? reserve(*send, links) : Bytes{};
  if (copy_ != copy_cached) staging = {};  // each block would wait for its streaming stores
  const Bytes sums = staging.empty() ? staging : staging.subspan(sizeof(FrameHeader));
  if (staging.empty())
    fold(frames[0], nullptr);
  else
    fold(*send, packs_ ? to_pack_.data() : sums.data());
  for (std::size_t i = 0; i < addends_.size(); ++i) links.release(plan.peers(frames[i])[0]);
  landed_ += addends_.size();
  if (call_.observer != nullptr)
    call_.observer->received(plan, frames.first(addends_.size()), arrived_bytes_, spent_);
  if (!staging.empty()) {
    const ConstBytes plain = ConstBytes(to_pack_).first(packs_ ? send->bytes : 0);
    commit(*send, staging, packs_ ? pack(plain, sums) : Staged{send->bytes}, links, traffic);
  }
  return true;
}

// Returns the next send if it sends the sum that the receives up to `landed` have added up; else
// null.
const SendFrame* Execution::send_of_sum(std::size_t landed) const {
  const auto& sends = call_.plan->sends();
  if (sent_ == sends.size()) return nullptr;
  const SendFrame& next = sends[sent_];
  return next.sends_sum && next.after_receives == landed ? &next : nullptr;
}

// Adds the addends to the frame's elements and, unless `out` is null, copies the sums there. It
// works block by block, so that a block stays in the first-level cache meanwhile.
void Execution::fold(const Frame& frame, std::byte* out) {
  constexpr std::size_t kBlock = 4096;  // bytes
  const DType dtype = call_.plan->spec().dtype;
  const codec::ReduceKernel add = fold_of(dtype, call_.plan->spec().op);
  std::size_t at = 0;
  for (const Chunk& chunk : call_.plan->chunks(frame))
    for (const Span& span : call_.plan->spans(chunk)) {
      Span block = span;
      const std::size_t end = span.offset + span.count;
      for (; block.offset < end; block.offset += block.count, at += bytes_of(block)) {
        block.count = std::min(kBlock / size_of(dtype), end - block.offset);
        for (const std::byte* addend : addends_) add(address(block), addend + at, block.count);
        if (chunk.completes_sum) scale(block);
        if (out != nullptr) copy_(out + at, address(block), bytes_of(block));
      }
    }
}

// Ends the execution when all frames have been sent and have landed. Finishes the results that no
// copy has finished.
bool Execution::try_end(Links& links) {
  if (!links.flush()) return note_wait(links.full_peer(), /*reads=*/true);
  const Plan& plan = *call_.plan;
  if (ended_ || sent_ < plan.sends().size() || landed_ < plan.receives().size()) return false;
  for (const Span& span : plan.finished_here()) finish_here(span);
  ended_ = true;
  return true;
}

const Frame* Execution::waiting_frame() const noexcept {
  const Plan& plan = *call_.plan;
  if (landed_ < plan.receives().size() && sent_ >= plan.receives()[landed_].after_sends)
    return &plan.receives()[landed_];
  if (sent_ < plan.sends().size()) return &plan.sends()[sent_];
  return nullptr;
}

Rank Execution::waiting_for() const noexcept {
  const Frame* frame = waiting_frame();
  return frame == nullptr ? kNoPeer : call_.plan->peers(*frame)[0];
}

FrameHeader Execution::header_of(const Frame& frame) const {
  FrameHeader header;
  header.communicator = call_.communicator;
  header.operation = call_.operation;
  header.fingerprint = call_.fingerprint;
  header.segment = frame.segment;
  header.segments = frame.segments;
  header.round = frame.round;
  header.flags = kFrameCollective;
  return header;
}

// Checks a header, and takes note of requests.
void Execution::check(FrameHeader header, const Frame& frame, Rank peer, ConstBytes payload) {
  const std::uint16_t requests = header.flags & kFrameRequests;
  const bool is_packed = call_.plan->packs() && (header.flags & kFramePacked) != 0;
  header.flags &= static_cast<std::uint16_t>(~(kFrameRequests | (is_packed ? kFramePacked : 0)));
  FrameHeader expected = header_of(frame);
  expected.length = static_cast<std::uint32_t>(payload.size());
  const std::size_t length = is_packed ? codec::unpacked_bytes(payload) : payload.size();
  const bool same = header == expected;
  if (same && fits(frame, is_packed, length)) return static_cast<void>(call_.requests |= requests);
  header.length = static_cast<std::uint32_t>(length);
  const std::string who = name_of(call_.rank) + ": rank " + std::to_string(peer);
  if (header.magic != expected.magic || header.communicator != expected.communicator)
    throw TransportError(who + " sent something that is not a frame of this communicator", peer);
  if (header.operation != expected.operation || header.fingerprint != expected.fingerprint)
    throw Disagreement{std::min(header.operation, expected.operation),
                       who + " sent a frame of its call " + std::to_string(header.operation) +
                           ", while rank " + std::to_string(call_.rank) + " is in call " +
                           std::to_string(expected.operation) + ", " + call_.plan->text()};
  const bool same_place = header.segment == expected.segment && header.round == expected.round;
  if (same_place && !call_.plan->all_sizes_known()) throw_size(header, frame, peer);
  throw TransportError(who + " sent segment " + std::to_string(header.segment) + " of round " +
                           std::to_string(header.round) + " (" + std::to_string(length) +
                           " bytes) where segment " + std::to_string(frame.segment) + " of round " +
                           std::to_string(frame.round) + " (" + std::to_string(frame.bytes) +
                           " bytes) must come",
                       peer);
}

// Returns whether the frame may have so many bytes, before it was packed.
bool Execution::fits(const Frame& frame, bool is_packed, std::size_t bytes) const {
  const bool exact = is_packed || !call_.plan->lossy() || call_.plan->codec().fixed_size();
  return exact ? bytes == frame.bytes : bytes <= frame.bytes;
}

// Throws the Disagreement for a block of another size than this rank expects.
void Execution::throw_size(const FrameHeader& header, const Frame& frame, Rank peer) const {
  const std::string me = name_of(call_.rank);
  const std::string sender = name_of(peer);
  const std::uint64_t expected = call_.plan->bytes_from(peer);
  std::string sent = "in " + std::to_string(header.segments) + " frames";
  if (header.segments == 1) sent = "of " + std::to_string(header.length) + " bytes";
  Disagreement found;
  found.call = call_.operation;
  found.what = call_.plan->text() + ", call " + std::to_string(call_.operation) + ": " + sender +
               " sends a block " + sent + ", and " + me + " expects one of " +
               std::to_string(expected) + " bytes in " + std::to_string(frame.segments) + " frames";
  found.sender = peer;
  found.expected = expected;
  throw found;
}

Execution::Staged Execution::stage_packed(const Frame& frame, Bytes out) {
  const std::size_t bytes = stage(frame, to_pack_);
  return pack(ConstBytes(to_pack_).first(bytes), out);
}

// Writes the payload as it is where packing makes it no smaller.
Execution::Staged Execution::pack(ConstBytes plain, Bytes out) {
  const Stopwatch stopwatch(spent_.encode);
  const std::size_t packed = codec::pack(call_.plan->spec().dtype, plain, out);
  if (packed > 0) return {packed, kFramePacked};
  if (!plain.empty()) std::memcpy(out.data(), plain.data(), plain.size());
  return {plain.size()};
}

std::size_t Execution::stage(const Frame& frame, Bytes out) {
  std::size_t written = 0;
  for (const Chunk& chunk : call_.plan->chunks(frame))
    written += stage_chunk(chunk, out.subspan(written));
  return written;
}

std::size_t Execution::stage_chunk(const Chunk& chunk, Bytes out) {
  if (chunk.completes_sum) finish(chunk);
  if (chunk.coded && chunk.store_index != kNotStored) {
    const std::size_t size = stored_bytes_[chunk.store_index];
    copy_(out.data(), store_of(chunk).data(), size);
    return size;
  }
  std::size_t written = 0;
  for (const Span& span : call_.plan->spans(chunk))
    written += encode(span, chunk.coded, out.subspan(written));
  return written;
}

// Finishes a sum that this rank owns: from here on all ranks, this one too, have the same bits.
void Execution::finish(const Chunk& chunk) {
  const auto spans = call_.plan->spans(chunk);
  if (chunk.store_index != kNotStored) {
    const Bytes store = store_of(chunk);
    std::size_t written = 0;
    for (const Span& span : spans) {
      const std::size_t size = encode(span, /*coded=*/true, store.subspan(written));
      decode(span, store.subspan(written, size));
      written += size;
    }
    stored_bytes_[chunk.store_index] = static_cast<std::uint32_t>(written);
  }
  for (const Span& span : spans) scale(span);
}

std::size_t Execution::encode(const Span& span, bool coded, Bytes out) {
  if (!coded) {
    const std::size_t size = bytes_of(span);
    copy_(out.data(), address(span), size);
    return size;
  }
  const codec::EncodeContext context = context_of(span);
  const Stopwatch stopwatch(spent_.encode);
  return codec::encode(call_.plan->codec(), floats(span), span.count, context, out);
}

codec::EncodeContext Execution::context_of(const Span& span) const {
  codec::EncodeContext context;
  if (!call_.contexts.empty()) context = call_.contexts[span.array];
  number(context, call_.rank, call_.operation);
  return context.from(span.offset);
}

// Decodes a final value, which has the same bits on all ranks. Returns the bytes consumed.
std::size_t Execution::decode(const Span& span, ConstBytes in) {
  const Stopwatch stopwatch(spent_.decode);
  const codec::Decoded decoded = call_.plan->codec().decode(in, floats(span), span.count);
  finite_ = finite_ && decoded.finite;
  return decoded.bytes;
}

void Execution::land(const Frame& frame, ConstBytes in, Rank peer) {
  try {
    std::size_t consumed = 0;
    for (const Chunk& chunk : call_.plan->chunks(frame))
      consumed += land_chunk(chunk, in.subspan(consumed));
    if (consumed != in.size()) throw InvalidArgument("a frame is longer than its chunks");
  } catch (const InvalidArgument& error) {  // the codec refuses a payload
    throw undecodable(peer, error);
  }
}

TransportError Execution::undecodable(Rank peer, const InvalidArgument& error) const {
  return TransportError(name_of(call_.rank) + ": rank " + std::to_string(peer) +
                            " sent a payload that can't be decoded: " + error.what(),
                        peer);
}

std::size_t Execution::land_chunk(const Chunk& chunk, ConstBytes in) {
  if (chunk.wide.place != WideFold::kNone) return land_wide(chunk, in);
  std::size_t consumed = 0;
  for (const Span& span : call_.plan->spans(chunk))
    consumed += chunk.coded ? land_coded(chunk, span, in.subspan(consumed))
                            : land_plain(chunk, span, in.subspan(consumed));
  if (chunk.coded && chunk.store_index != kNotStored) {
    copy_cached(store_of(chunk).data(), in.data(), consumed);
    stored_bytes_[chunk.store_index] = static_cast<std::uint32_t>(consumed);
  }
  return consumed;
}

// Adds the chunk to a float32 sum, which the last addend rounds. Returns the bytes consumed.
std::size_t Execution::land_wide(const Chunk& chunk, ConstBytes in) {
  const Plan& plan = *call_.plan;
  const codec::WideKernels& wide = *codec::wide_kernels(plan.spec().dtype, plan.spec().op);
  const float factor = chunk.wide.averages ? static_cast<float>(1.0 / plan.divisor()) : 1;
  float* sum = wide_.data() + plan.wide_offset(chunk.wide);
  std::size_t consumed = 0;
  for (const Span& span : plan.spans(chunk)) {
    const ConstBytes addend = first(in.subspan(consumed), bytes_of(span));
    if (chunk.wide.begins)
      wide.begin(address(span), addend.data(), sum, span.count);
    else
      wide.fold(sum, addend.data(), span.count);
    if (chunk.wide.ends) wide.round(sum, factor, address(span), span.count);
    sum += span.count;
    consumed += addend.size();
  }
  return consumed;
}

std::size_t Execution::land_plain(const Chunk& chunk, const Span& span, ConstBytes in) {
  const OpSpec& spec = call_.plan->spec();
  const ConstBytes payload = first(in, bytes_of(span));
  if (chunk.landing == Landing::kCopy) {
    std::memcpy(address(span), payload.data(), payload.size());
    if (call_.plan->lossy()) finite_ = finite_ && codec::kernels().finite(floats(span), span.count);
  } else {
    fold_of(spec.dtype, spec.op)(address(span), payload.data(), span.count);
  }
  return payload.size();
}

// Lands a payload. It passes the codec no more bytes than the codec can make, since the place where
// they are kept and sent on has room for no more. Returns the bytes consumed.
std::size_t Execution::land_coded(const Chunk& chunk, const Span& span, ConstBytes in) {
  in = in.first(std::min(in.size(), call_.plan->codec().max_bytes(span.count)));
  if (chunk.landing == Landing::kReduce) {
    const Stopwatch stopwatch(spent_.decode);
    return call_.plan->codec().decode_add(in, floats(span), span.count).bytes;
  }
  const std::size_t size = decode(span, in);
  scale(span);
  return size;
}

Bytes Execution::store_of(const Chunk& chunk) {
  return Bytes(store_).subspan(call_.plan->store_offset(chunk.store_index));
}

// Finishes a result that only this rank has and that was never encoded: all of the residual is
// delivered.
void Execution::finish_here(const Span& span) {
  if (call_.plan->lossy()) {
    codec::deliver(context_of(span), floats(span), span.count);
    finite_ = codec::mark_not_finite(call_.plan->codec(), floats(span), span.count) && finite_;
  }
  scale(span);
}

void Execution::scale(const Span& span) {
  const int divisor = call_.plan->divisor();
  if (divisor > 1) codec::average(call_.plan->spec().dtype, address(span), divisor, span.count);
}

std::byte* Execution::address(const Span& span) const {
  return call_.arrays[span.array] + span.offset * size_of(call_.plan->spec().dtype);
}

float* Execution::floats(const Span& span) const {
  return reinterpret_cast<float*>(call_.arrays[span.array]) + span.offset;
}

}  // namespace gradwire::exec
