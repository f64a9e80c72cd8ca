#include "gradwire/exec/trace/recorder.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <limits>

#include "gradwire/base/op.h"
#include "gradwire/base/wire.h"

namespace gradwire::exec {
namespace {

constexpr std::size_t kMostLabels = 4096;
// A shorter time between two pieces of work is the driver's own.
constexpr std::uint64_t kLeastWait = 2000;  // nanoseconds

std::uint32_t nanoseconds(double seconds) {
  constexpr double kMost = std::numeric_limits<std::uint32_t>::max();
  return static_cast<std::uint32_t>(std::clamp(seconds * 1e9, 0.0, kMost));
}

std::int32_t thread_number() noexcept {
  thread_local const auto number = static_cast<std::int32_t>(::syscall(SYS_gettid));
  return number;
}

std::uint64_t label_of(const Request& request) {
  Fnv1a label;
  label.number(static_cast<std::uint64_t>(request.collective))
      .number(static_cast<std::uint64_t>(request.dtype))
      .number(static_cast<std::uint64_t>(request.op));
  const auto add = [&label](std::string_view text) {
    label.number(text.size()).bytes(text.data(), text.size());
  };
  if (request.codec) add(request.codec->name());
  add(request.trace_name);
  if (request.trace_name.empty())
    for (const codec::KeyedArray& each : request.keys) add(each.key);
  return label.digest();
}

// Returns lines: collective, dtype, op, codec, and the call's name, or else the keys of its arrays,
// one a line.
std::string text_of(const Request& request) {
  std::string text;
  const auto add = [&text](std::string_view line) { text.append(line).push_back('\n'); };
  add(name_of(request.collective));
  add(name_of(request.dtype));
  add(reduces(request.collective) ? name_of(request.op) : "");
  add(request.codec ? request.codec->name() : "none");
  if (!request.trace_name.empty())
    add(request.trace_name);
  else
    for (const codec::KeyedArray& each : request.keys) add(each.key);
  text.pop_back();
  return text;
}

std::uint64_t plain_bytes(const Plan& plan, const Frame& frame) {
  std::uint64_t elements = 0;
  for (const Chunk& chunk : plan.chunks(frame))
    for (const Span& span : plan.spans(chunk)) elements += span.count;
  return elements * size_of(plan.spec().dtype);
}

bool adds(const Plan& plan, const ReceiveFrame& frame) {
  return plan.chunks(frame)[0].landing == schedule::Landing::kReduce;
}

}  // namespace

Recorder::Recorder(std::size_t events, std::int64_t skew)
    : skew_(static_cast<std::uint64_t>(skew)),
      events_(events),
      waits_(std::min<std::size_t>(events, 1 << 14)),
      known_plans_(kMostLabels) {
  labels_.reserve(kMostLabels);
}

std::uint64_t Recorder::at(Clock::time_point time) const noexcept {
  const auto count = std::chrono::nanoseconds(time.time_since_epoch()).count();
  return static_cast<std::uint64_t>(count) + skew_;
}

Recorder::Events Recorder::read() const {
  Events found;
  std::uint64_t dropped = 0;
  found.events = events_.read(found.dropped);
  for (const Event& each : waits_.read(dropped)) found.events.push_back(each);
  found.dropped += dropped;
  const std::lock_guard lock(mutex_);
  found.labels.insert(labels_.begin(), labels_.end());
  found.unlabelled = unlabelled_;
  return found;
}

// ---- Callers' threads --------------------------------------------------------------------------

Submission Recorder::submitted(const Request& request) noexcept {
  const Submission made{now(), label_of(request), input_bytes(request)};
  const std::lock_guard lock(mutex_);
  if (labels_.contains(made.label)) return made;
  try {
    describe(made.label, text_of(request));
  } catch (const std::bad_alloc&) {
    ++unlabelled_;
  }
  return made;
}

void Recorder::blocked(Clock::time_point since) noexcept {
  Event event;
  event.kind = EventKind::kBlocked;
  event.peer = thread_number();
  event.begin = at(since);
  event.duration = now() - event.begin;
  waits_.add(event);
}

// Called under the mutex.
bool Recorder::describe(std::uint64_t label, const std::string& text) noexcept {
  try {
    if (labels_.size() < kMostLabels) return labels_.emplace(label, text).second;
  } catch (const std::bad_alloc&) {
  }
  ++unlabelled_;
  return false;
}

// ---- The driver --------------------------------------------------------------------------------

void Recorder::started(const Submission& submission) noexcept {
  call_ = Event{};
  call_.kind = EventKind::kCall;
  call_.begin = now();
  // A call that was submitted before there was an observer has waited for an unknown time.
  const std::uint64_t submitted = submission.at == 0 ? call_.begin : submission.at;
  const std::uint64_t queued = call_.begin - std::min(submitted, call_.begin);
  call_.encode = static_cast<std::uint32_t>(queued >> 32);
  call_.decode = static_cast<std::uint32_t>(queued);
  call_.plain = submission.bytes;
  call_.label = submission.label;
  idle_ = begin_ = call_.begin;
  in_phase_ = false;
}

void Recorder::phase(const Plan& plan, std::uint32_t operation) noexcept {
  if (call_.round++ == 0) call_.operation = operation;
  phase_ = Event{};
  phase_.kind = EventKind::kPhase;
  phase_.begin = now();
  phase_.operation = operation;
  phase_.label = plan.fingerprint();
  charged_ = {};
  idle_ = phase_.begin;
  sender_ = reader_ = kNoPeer;
  in_phase_ = true;
  describe_plan(plan);
}

void Recorder::describe_plan(const Plan& plan) noexcept {
  std::uint32_t& known = known_plans_[plan.fingerprint() % kMostLabels];
  if (known == plan.fingerprint()) return;
  known = plan.fingerprint();
  const std::lock_guard lock(mutex_);
  if (!labels_.contains(plan.fingerprint())) describe(plan.fingerprint(), plan.text());
}

// Adds a wait from the end of the last work to `end`, if this rank has waited for such a peer.
void Recorder::wait_until(std::uint64_t end, Rank peer, std::uint8_t flags) noexcept {
  if (peer == kNoPeer || end < idle_ + kLeastWait) return;
  Event event;
  event.kind = EventKind::kWait;
  event.flags = flags;
  event.peer = peer;
  event.operation = phase_.operation;
  event.begin = idle_;
  event.duration = end - idle_;
  events_.add(event);
}

// Takes the codec's time since the last event.
void Recorder::charge(Event& event, const CodecTime& spent) noexcept {
  event.encode = nanoseconds(spent.encode - charged_.encode);
  event.decode = nanoseconds(spent.decode - charged_.decode);
  charged_ = spent;
}

// Gives the event the time since work began; what follows without moves() takes no time.
void Recorder::finish_work(Event& event) noexcept {
  const std::uint64_t end = now();
  event.begin = begin_;
  event.duration = end - begin_;
  begin_ = idle_ = end;
  sender_ = reader_ = kNoPeer;
}

void Recorder::sent(const Plan& plan, const Frame& frame, std::size_t bytes,
                    const CodecTime& spent) noexcept {
  wait_until(begin_, reader_, kEventReader);
  Event event;
  event.kind = EventKind::kSend;
  event.round = frame.round;
  event.operation = phase_.operation;
  event.segment = frame.segment;
  event.bytes = bytes;
  event.plain = plain_bytes(plan, frame);
  charge(event, spent);
  finish_work(event);
  for (const Rank peer : plan.peers(frame)) {
    event.peer = peer;
    events_.add(event);
    event.flags = kEventAgain;
    event.encode = event.decode = 0;
    phase_.bytes += bytes;
  }
}

void Recorder::received(const Plan& plan, std::span<const ReceiveFrame> frames, std::size_t bytes,
                        const CodecTime& spent) noexcept {
  wait_until(begin_, sender_, 0);
  Event event;
  event.kind = EventKind::kReceive;
  event.flags = adds(plan, frames[0]) ? kEventReduces : std::uint8_t{0};
  event.operation = phase_.operation;
  event.bytes = bytes;
  charge(event, spent);
  finish_work(event);
  for (const Frame& frame : frames) {
    event.round = frame.round;
    event.segment = frame.segment;
    event.peer = plan.peers(frame)[0];
    event.plain = plain_bytes(plan, frame);
    events_.add(event);
    event.flags |= kEventAgain;
    event.duration = 0;  // they arrived before that work began
    event.encode = event.decode = 0;
  }
}

void Recorder::moved(const MessageFrame& frame) noexcept {
  Event event;
  event.kind = EventKind::kMessage;
  event.flags = frame.sent ? kEventSent : std::uint8_t{0};
  event.peer = frame.peer;
  event.operation = frame.message;
  event.segment = frame.frame;
  event.begin = begin_;
  event.duration = now() - begin_;  // a wait of the collective goes on meanwhile
  event.bytes = frame.bytes;
  event.plain = frame.bytes - sizeof(FrameHeader);
  events_.add(event);
}

void Recorder::computed(const CodecTime& spent) noexcept {
  Event event;
  event.kind = EventKind::kLocal;
  event.operation = phase_.operation;
  charged_ = {};
  charge(event, spent);
  finish_work(event);
  if (event.duration >= kLeastWait) events_.add(event);
}

void Recorder::phase_over() noexcept {
  const std::uint64_t end = now();
  const bool reads = sender_ == kNoPeer;
  wait_until(end, reads ? reader_ : sender_, reads ? kEventReader : std::uint8_t{0});
  phase_.duration = end - phase_.begin;
  call_.bytes += phase_.bytes;
  events_.add(phase_);
  idle_ = begin_ = end;
  sender_ = reader_ = kNoPeer;
  in_phase_ = false;
}

void Recorder::ended(const std::exception_ptr& failure) noexcept {
  if (in_phase_) phase_over();
  if (failure) call_.flags = kEventFailed;
  call_.duration = now() - call_.begin;
  events_.add(call_);
}

}  // namespace gradwire::exec
