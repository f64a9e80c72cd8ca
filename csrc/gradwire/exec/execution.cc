#include "gradwire/exec/execution.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "gradwire/base/error.h"
#include "gradwire/codec/simd.h"
#include "gradwire/exec/failure.h"

namespace gradwire::exec {
namespace {

using schedule::Landing;

std::size_t index_of(DType dtype) { return static_cast<std::size_t>(dtype); }

codec::ReduceKernel fold_of(DType dtype, ReduceOp op) {
  return codec::kernels().reduce[index_of(dtype)][static_cast<std::size_t>(op)];
}

// memcpy that takes null for nothing.
void copy_bytes(Bytes to, ConstBytes from, std::size_t size) {
  if (size > 0) std::memcpy(to.data(), from.data(), size);
}

ConstBytes first(ConstBytes in, std::size_t size) {
  if (in.size() < size) throw InvalidArgument("a frame is shorter than its parts");
  return in.first(size);
}

}  // namespace

void Execution::start(const Call& call) {
  call_ = call;
  sent_ = landed_ = 0;
  ended_ = false;
  finite_ = true;
  if (store_.size() < call.plan->store_bytes()) store_.resize(call.plan->store_bytes());
  if (stored_bytes_.size() < call.plan->stored_parts())
    stored_bytes_.resize(call.plan->stored_parts());
}

bool Execution::advance(Links& links, TrafficCounter& traffic) {
  const bool sent = try_send(links, traffic);
  const bool received = try_receive(links);
  // What a full socket did not take goes on its way while this rank waits for others.
  return sent || received || (links.flush() && try_end());
}

bool Execution::try_send(Links& links, TrafficCounter& traffic) {
  const Plan& plan = *call_.plan;
  if (sent_ == plan.sends().size()) return false;
  const Frame& frame = plan.sends()[sent_];
  if (landed_ < frame.needs) return false;
  const auto peers = plan.peers(frame);
  const Bytes staging = links.reserve(peers, sizeof(FrameHeader) + frame.bytes);
  if (staging.empty()) return false;
  FrameHeader header = header_of(frame);
  header.length = static_cast<std::uint32_t>(stage(frame, staging.subspan(sizeof header)));
  std::memcpy(staging.data(), &header, sizeof header);
  links.commit(sizeof header + header.length);
  traffic.add(sizeof header + header.length, peers.size());
  ++sent_;
  return true;
}

bool Execution::try_receive(Links& links) {
  const Plan& plan = *call_.plan;
  if (landed_ == plan.receives().size()) return false;
  const Frame& frame = plan.receives()[landed_];
  if (sent_ < frame.needs) return false;
  const Rank peer = plan.peers(frame)[0];
  const auto message = links.peek(peer);
  if (!message) return false;
  FrameHeader header;
  if (message->size() < sizeof header)
    throw TransportError("rank " + std::to_string(peer) + " sent a frame without a header", peer);
  std::memcpy(&header, message->data(), sizeof header);
  check(header, frame, peer, message->size() - sizeof header);
  land(frame, message->subspan(sizeof header), peer);
  links.release(peer);
  ++landed_;
  return true;
}

// The last act: everything staged is on its way, and what no copy finished is finished here.
bool Execution::try_end() {
  const Plan& plan = *call_.plan;
  if (ended_ || sent_ < plan.sends().size() || landed_ < plan.receives().size()) return false;
  for (const Piece& piece : plan.finished_here()) finish_here(piece);
  ended_ = true;
  return true;
}

const Frame* Execution::waiting_frame() const noexcept {
  const Plan& plan = *call_.plan;
  if (landed_ < plan.receives().size() && sent_ >= plan.receives()[landed_].needs)
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
  header.fingerprint = call_.plan->fingerprint();
  header.segment = frame.segment;
  header.segments = frame.segments;
  header.round = frame.round;
  header.flags = kFrameCollective;
  return header;
}

void Execution::check(const FrameHeader& header, const Frame& frame, Rank peer,
                      std::size_t length) const {
  FrameHeader expected = header_of(frame);
  expected.length = static_cast<std::uint32_t>(length);
  const bool length_ok =
      call_.plan->codec().fixed_size() ? length == frame.bytes : length <= frame.bytes;
  if (header == expected && length_ok) return;
  const std::string who = "rank " + std::to_string(call_.rank) + ": rank " + std::to_string(peer);
  if (header.magic != expected.magic || header.communicator != expected.communicator)
    throw TransportError(who + " sent something that is not a frame of this communicator", peer);
  if (header.operation != expected.operation || header.fingerprint != expected.fingerprint)
    throw Disagreement{std::min(header.operation, expected.operation),
                       who + " sent a frame of its call " + std::to_string(header.operation) +
                           ", while rank " + std::to_string(call_.rank) + " is in call " +
                           std::to_string(expected.operation) + ", " + call_.plan->text()};
  throw TransportError(who + " sent segment " + std::to_string(header.segment) + " of round " +
                           std::to_string(header.round) + " (" + std::to_string(length) +
                           " bytes) where segment " + std::to_string(frame.segment) + " of round " +
                           std::to_string(frame.round) + " (" + std::to_string(frame.bytes) +
                           " bytes) must come",
                       peer);
}

std::size_t Execution::stage(const Frame& frame, Bytes out) {
  std::size_t written = 0;
  for (const Part& part : call_.plan->parts(frame))
    written += stage_part(part, out.subspan(written));
  return written;
}

std::size_t Execution::stage_part(const Part& part, Bytes out) {
  if (part.finishes) finish(part);
  if (part.stored != kNotStored) {
    const std::size_t size = stored_bytes_[part.stored];
    copy_bytes(out, store_of(part), size);
    return size;
  }
  std::size_t written = 0;
  for (const Piece& piece : call_.plan->pieces(part))
    written += encode(piece, out.subspan(written));
  return written;
}

// This rank owns the finished sum: from here on everybody, this rank too, has the same bits.
void Execution::finish(const Part& part) {
  const auto pieces = call_.plan->pieces(part);
  if (part.stored != kNotStored) {
    const Bytes store = store_of(part);
    std::size_t written = 0;
    for (const Piece& piece : pieces) {
      const std::size_t size = encode(piece, store.subspan(written));
      decode(piece, store.subspan(written, size));
      written += size;
    }
    stored_bytes_[part.stored] = static_cast<std::uint32_t>(written);
  }
  for (const Piece& piece : pieces) scale(piece);
}

std::size_t Execution::encode(const Piece& piece, Bytes out) {
  if (!call_.plan->lossy()) {
    const std::size_t size = piece.count * size_of(call_.plan->spec().dtype);
    std::memcpy(out.data(), address(piece), size);
    return size;
  }
  const codec::Site site = site_of(piece);
  const Stopwatch stopwatch(spent_.encode);
  return call_.plan->codec().encode(floats(piece), piece.count, site, out);
}

codec::Site Execution::site_of(const Piece& piece) const {
  codec::Site site;
  if (!call_.sites.empty()) site = call_.sites[piece.extent];
  number(site, call_.rank, call_.operation);
  site.element += piece.offset;
  if (site.residual != nullptr) site.residual += piece.offset;
  if (site.error != nullptr) site.error += piece.offset;
  return site;
}

// A final value, of the same bits on all ranks. Returns the bytes consumed.
std::size_t Execution::decode(const Piece& piece, ConstBytes in) {
  const Stopwatch stopwatch(spent_.decode);
  const codec::Decoded decoded = call_.plan->codec().decode(in, floats(piece), piece.count);
  finite_ = finite_ && decoded.finite;
  return decoded.bytes;
}

void Execution::land(const Frame& frame, ConstBytes in, Rank peer) {
  try {
    std::size_t consumed = 0;
    for (const Part& part : call_.plan->parts(frame))
      consumed += land_part(part, in.subspan(consumed));
    if (consumed != in.size()) throw InvalidArgument("a frame is longer than its parts");
  } catch (const InvalidArgument& error) {  // a payload that its codec refuses
    throw TransportError("rank " + std::to_string(call_.rank) + ": rank " + std::to_string(peer) +
                             " sent a payload that can't be decoded: " + error.what(),
                         peer);
  }
}

std::size_t Execution::land_part(const Part& part, ConstBytes in) {
  const bool coded = call_.plan->lossy();
  std::size_t consumed = 0;
  for (const Piece& piece : call_.plan->pieces(part))
    consumed += coded ? land_coded(part, piece, in.subspan(consumed))
                      : land_plain(part, piece, in.subspan(consumed));
  if (part.stored != kNotStored) {
    copy_bytes(store_of(part), in, consumed);
    stored_bytes_[part.stored] = static_cast<std::uint32_t>(consumed);
  }
  return consumed;
}

std::size_t Execution::land_plain(const Part& part, const Piece& piece, ConstBytes in) {
  const OpSpec& spec = call_.plan->spec();
  const ConstBytes payload = first(in, piece.count * size_of(spec.dtype));
  if (part.landing == Landing::kCopy) {
    std::memcpy(address(piece), payload.data(), payload.size());
  } else {
    fold_of(spec.dtype, spec.op)(address(piece), payload.data(), piece.count);
  }
  return payload.size();
}

// No payload is longer than its codec makes it: what is stored and sent on has room for no more.
std::size_t Execution::land_coded(const Part& part, const Piece& piece, ConstBytes in) {
  in = in.first(std::min(in.size(), call_.plan->codec().max_bytes(piece.count)));
  if (part.landing == Landing::kReduce) {
    const Stopwatch stopwatch(spent_.decode);
    return call_.plan->codec().decode_add(in, floats(piece), piece.count).bytes;
  }
  const std::size_t size = decode(piece, in);
  scale(piece);
  return size;
}

Bytes Execution::store_of(const Part& part) {
  return Bytes(store_).subspan(call_.plan->store_offset(part.stored));
}

// A result that this rank alone has, and never encoded: all of the residual is delivered.
void Execution::finish_here(const Piece& piece) {
  if (call_.plan->lossy()) {
    const codec::Site site = site_of(piece);
    if (site.residual != nullptr)
      fold_of(DType::kFloat32, ReduceOp::kSum)(floats(piece), site.residual, piece.count);
    if (site.error != nullptr) std::fill_n(site.error, piece.count, 0.0F);
    finite_ = codec::mark_not_finite(call_.plan->codec(), floats(piece), piece.count) && finite_;
  }
  scale(piece);
}

void Execution::scale(const Piece& piece) {
  const double factor = call_.plan->factor();
  if (factor == 1) return;
  codec::kernels().scale[index_of(call_.plan->spec().dtype)](address(piece), factor, piece.count);
}

std::byte* Execution::address(const Piece& piece) const {
  return call_.extents[piece.extent] + piece.offset * size_of(call_.plan->spec().dtype);
}

float* Execution::floats(const Piece& piece) const {
  return reinterpret_cast<float*>(call_.extents[piece.extent]) + piece.offset;
}

}  // namespace gradwire::exec
