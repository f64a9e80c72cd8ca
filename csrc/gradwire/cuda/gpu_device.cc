#include "gradwire/cuda/gpu_device.h"

#include <algorithm>
#include <atomic>

#include "gradwire/base/error.h"

namespace gradwire::cuda {
namespace {

int count(const auto& list) { return static_cast<int>(list.size()); }

}  // namespace

GpuDevice::GpuDevice(const Api& api, Rank rank, int size, Messages& messages,
                     exec::PlanCache& plans)
    : api_(api),
      operation_(api, rank, size, messages, plans),
      native_(api, messages),
      rooms_{Room(api), Room(api, Room::MemoryKind::kPinned), Room(api), Room(api), Room(api),
             Room(api)} {
  own_flags_ = reinterpret_cast<std::uint32_t*>(rooms_.flags.take(kPayloadAlignment));
  constexpr std::size_t kBytes = 2 * sizeof(std::uint32_t);
  std::fill_n(rooms_.reported.take(kBytes), kBytes, std::byte{0});
  reported_ = reinterpret_cast<std::uint32_t*>(rooms_.reported.data());
  lost_ = reported_ + 1;
  messages.set_loss_word(lost_);
}

std::uint32_t GpuDevice::take_flags() { return std::atomic_ref(*reported_).exchange(0); }

void GpuDevice::bind(const exec::Request& request, const exec::Decision& decision,
                     GpuFeedback* feedback, const CallStream& stream) {
  stream_ = stream;
  feedback_ = feedback;
  has_voted_ = false;
  program_.bind(request, decision, feedback != nullptr, *this);
  codec_ = codec_for(request.codec);
  const std::size_t scratch =
      codec_ == nullptr ? 0 : codec_->scratch_bytes(std::span(program_.counts()));
  scratch_ = rooms_.scratch.take(scratch, stream_);
  if (decision.method == exec::Method::kPlan) operation_.find(plan_request());
  if (decision.method == exec::Method::kLowRank) operation_.find(program_.sum_of_lefts());
  if (decision.method != exec::Method::kGather || request.size == 1) return;
  place_payloads();
  operation_.find(payload_phase());
}

void GpuDevice::run() {
  begin();
  while (const exec::Request* phase = program_.next(*this)) run_phase(*phase, {});
  if (!stream_.is_captured() && codec_ != nullptr)
    check(api_, api_.add_flags(flags_, reported_, stream_), "telling a call's flags");
  ++operations_;
}

// ---- What every call begins and ends with ------------------------------------------------------

// All calls of a step share one word of flags.
void GpuDevice::begin() {
  const exec::Request& request = program_.request();
  const bool in_step = feedback_ != nullptr && feedback_->in_step();
  flags_ = in_step ? feedback_->step_flags() : own_flags_;
  const bool plain = !request.codec || request.codec->combine() == codec::Combine::kPlain;
  if ((feedback_ != nullptr || !plain) && !in_step)
    check(api_, api_.fill(flags_, 0, sizeof(std::uint32_t), stream_), "cudaMemsetAsync");
  bind_feedback();
}

const GpuCodec* GpuDevice::codec_for(const std::shared_ptr<const codec::Codec>& codec) {
  using codec::Combine;
  if (!codec || codec->combine() == Combine::kPlain || codec->combine() == Combine::kCompound)
    return nullptr;
  auto& made = codecs_[codec];
  if (!made) made = GpuCodec::make(api_, *codec);
  return made.get();
}

void GpuDevice::bind_feedback() {
  array_feedback_.assign(program_.counts().size(), {});
  table_ = nullptr;
  if (feedback_ != nullptr) return bind_keys();
  if (codec_ == nullptr) return;
  for (ArrayFeedback& each : array_feedback_) each.call = operations_ ^ rank() << 48;
  if (!codec_->adapts()) return;
  const std::size_t bytes = sizeof(GpuKeyState) * array_feedback_.size();
  auto* key_state = reinterpret_cast<GpuKeyState*>(rooms_.key_states.take(bytes, stream_));
  check(api_, api_.fill(key_state, 0, bytes, stream_), "cudaMemsetAsync");
  for (ArrayFeedback& each : array_feedback_) each.span_feedback.key_state = key_state++;
}

void GpuDevice::bind_keys() {
  table_ = &feedback_->open(program_.request().keys, stream_);
  for (std::size_t i = 0; i < array_feedback_.size(); ++i) {
    const auto [key, begin] = program_.key_offsets()[i];
    const GpuFeedback::DeviceKey& its = *table_->keys[key];
    array_feedback_[i] = {its.span_feedback(begin), its.digest ^ rank() << 48, begin};
  }
}

void GpuDevice::run_phase(const exec::Request& phase, std::span<const Slotted> layout) {
  operation_.bind(phase, stream_);
  operation_.run({}, layout);
}

// Lets ranks that hold different results agree whether the new residuals are kept.
const exec::Request* GpuDevice::vote() {
  look_for_failure();
  has_voted_ = true;
  word_ = {reinterpret_cast<std::byte*>(flags_), 1};
  phase_ = program_.phase(Collective::kAllReduce, DType::kInt32, ReduceOp::kMax);
  phase_.inputs = phase_.outputs = {&word_, 1};
  return &phase_;
}

void GpuDevice::finish() {
  const bool factored = program_.decision().method == exec::Method::kLowRank;
  if (table_ != nullptr) look_for_failure();
  if (factored || has_voted_) poison();
  if (table_ != nullptr) feedback_->settle(*table_, /*remembers=*/factored, flags_, stream_);
}

void GpuDevice::look_for_failure() {
  check(api_, api_.add_flags(lost_, flags_, stream_), "looking for a failure");
}

void GpuDevice::poison() {
  spans_.clear();
  for (const exec::Array& each : program_.request().outputs)
    spans_.push_back({.y = reinterpret_cast<float*>(each.data), .n = each.count});
  check(api_, api_.poison(spans_.data(), count(spans_), flags_, stream_), "poisoning");
}

// ---- Spans -------------------------------------------------------------------------------------

std::span<const GpuSpan> GpuDevice::spans_of(std::span<const exec::SummedArray> arrays) {
  spans_.clear();
  for (const exec::SummedArray& each : arrays) {
    const ArrayFeedback& feedback = array_feedback_[each.index];
    spans_.push_back({.x = each.x,
                      .y = each.y,
                      .n = each.count,
                      .span_feedback = feedback.span_feedback,
                      .call = feedback.call,
                      .element = feedback.element});
  }
  return spans_;
}

void GpuDevice::deliver(std::span<const exec::SummedArray> arrays) {
  const auto spans = spans_of(arrays);
  if (feedback_ != nullptr)
    return check(api_, api_.deliver_spans(spans.data(), count(spans), stream_), "delivering");
  for (const GpuSpan& each : spans)
    if (each.y != each.x)
      check(api_, api_.copy(each.y, each.x, 4 * each.n, CopyKind::kOnDevice, stream_),
            "cudaMemcpyAsync");
}

void GpuDevice::mark(std::span<const exec::SummedArray> arrays) {
  const auto spans = spans_of(arrays);
  const auto& codec = program_.request().codec;
  check(api_,
        api_.mark_spans(spans.data(), count(spans), codec ? codec->block() : 1, flags_, stream_),
        "marking");
}

void GpuDevice::average(std::span<const exec::SummedArray> arrays) {
  for (const exec::SummedArray& each : arrays)
    check(api_,
          api_.scale(static_cast<int>(DType::kFloat32), each.y, 1.0 / program_.request().size,
                     each.count, stream_),
          "scaling");
}

void GpuDevice::prepare(std::span<const GpuSpan> spans) {
  if (!codec_->adapts()) return;
  for (const GpuSpan& each : spans) codec_->prepare(each, scratch_, stream_);
}

// Adapts each key once, even where several arrays belong to it.
void GpuDevice::adapt() {
  if (!codec_->adapts()) return;
  std::uint64_t elements = 0;
  for (std::size_t i = 0; i < array_feedback_.size(); ++i) {
    elements += program_.counts()[i];
    GpuKeyState* const key_state = array_feedback_[i].span_feedback.key_state;
    if (i + 1 < array_feedback_.size() &&
        array_feedback_[i + 1].span_feedback.key_state == key_state)
      continue;
    codec_->adapt(elements, key_state, stream_);
    elements = 0;
  }
}

// ---- Plans and native collectives --------------------------------------------------------------

exec::Request GpuDevice::plan_request() const {
  exec::Request request = program_.request();
  request.algorithm = program_.decision().algorithm;
  return request;
}

const exec::Request* GpuDevice::run_plan() {
  operation_.bind(plan_request(), stream_);
  const exec::BufferMap& places = operation_.buffer_map();
  if (codec_ != nullptr) {
    prepare(spans_of(at(places.arrays())));
    operation_.run({codec_, array_feedback_, scratch_, flags_}, {});
    adapt();
    return nullptr;
  }
  const bool folds = operation_.plan().folds();
  if (feedback_ != nullptr) deliver(at(folds ? places.addends() : places.arrays()));
  operation_.run({}, {});
  for (std::size_t i = 0; i < places.sums().size() && i < own_.size(); ++i)
    own_[i].y = reinterpret_cast<float*>(places.sums()[i].data);
  if (feedback_ != nullptr) mark(own_);
  return nullptr;
}

// Returns the arrays at these places, in place.
std::span<const exec::SummedArray> GpuDevice::at(std::span<std::byte* const> places) {
  own_.clear();
  for (std::size_t i = 0; i < places.size(); ++i) {
    auto* const data = reinterpret_cast<float*>(places[i]);
    own_.push_back({i, data, data, program_.counts()[i]});
  }
  return own_;
}

void GpuDevice::run_native() {
  native_.run(program_.request(), /*in_place=*/feedback_ != nullptr, stream_);
}

// ---- Payloads ----------------------------------------------------------------------------------

// Places the payloads end to end, as the arrays are.
void GpuDevice::place_payloads() {
  gathered_.places.clear();
  gathered_.layout.clear();
  gathered_.block_bytes = 0;
  for (const std::uint64_t each : program_.counts()) {
    gathered_.places.push_back(gathered_.block_bytes);
    gathered_.block_bytes += codec_->payload_bytes(each);
    if (codec_->slot_bytes() > 0) gathered_.layout.push_back(codec_->layout(each));
  }
  std::byte* const blocks = rooms_.payloads.take(gathered_.block_bytes * size(), stream_);
  gathered_.blocks.clear();
  for (std::size_t r = 0; r < size(); ++r)
    gathered_.blocks.push_back({blocks + r * gathered_.block_bytes, gathered_.block_bytes});
}

void GpuDevice::encode(std::span<const exec::SummedArray> arrays) {
  spans_of(arrays);
  for (std::size_t i = 0; i < arrays.size(); ++i) spans_[i].payload = gathered_.places[i];
  prepare(spans_);
  codec_->encode(spans_, {.out = gathered_.blocks[rank()].data}, scratch_, flags_, stream_);
  adapt();
}

const exec::Request& GpuDevice::payload_phase() {
  phase_ = program_.phase(Collective::kAllGather, DType::kUInt8, ReduceOp::kSum);
  phase_.algorithm = program_.decision().algorithm;
  phase_.inputs = {&gathered_.blocks[rank()], 1};
  phase_.outputs = gathered_.blocks;
  return phase_;
}

const exec::Request* GpuDevice::exchange_payloads() {
  run_phase(payload_phase(), gathered_.layout);
  return nullptr;
}

// A unit that is not finite is none before and after averaging.
void GpuDevice::add_up(std::span<const exec::SummedArray> arrays) {
  own_.assign(arrays.begin(), arrays.end());
  std::erase_if(own_, [](const exec::SummedArray& each) { return each.y == nullptr; });
  spans_of(own_);
  for (std::size_t i = 0; i < own_.size(); ++i) spans_[i].payload = gathered_.places[own_[i].index];
  Decoding how;
  how.payloads = {rooms_.payloads.data(), static_cast<std::int64_t>(gathered_.block_bytes),
                  count(gathered_.blocks)};
  how.factor = averages() ? static_cast<float>(1.0 / count(gathered_.blocks)) : 1;
  codec_->decode(spans_, how, flags_, stream_);
  mark(own_);
}

// ---- Factors -----------------------------------------------------------------------------------

exec::Device::FactorRoom GpuDevice::take_factor_room(std::size_t left, std::size_t right) {
  low_rank_.left = left;
  low_rank_.right = right;
  const std::size_t doubles = aligned(8 * left), lefts = aligned(4 * left),
                    rights = aligned(4 * right), scales = aligned(8 * program_.counts().size());
  std::byte* at = rooms_.factors.take(doubles + lefts + 2 * rights + scales, stream_);
  low_rank_.columns = reinterpret_cast<double*>(at);
  low_rank_.room.left = reinterpret_cast<float*>(at += doubles);
  low_rank_.room.right = reinterpret_cast<float*>(at += lefts);
  low_rank_.room.own_right = reinterpret_cast<float*>(at += rights);
  low_rank_.scales = reinterpret_cast<float*>(at + rights);
  return low_rank_.room;
}

// Makes room for the factors that keys remember.
void GpuDevice::remember(std::span<const exec::Matrix> matrices) {
  std::vector<std::uint64_t> elements(program_.request().keys.size(), 0);
  for (const exec::Matrix& each : matrices)
    elements[each.in_memory.key] = each.in_memory.begin + each.right_size();
  feedback_->remember(*table_, elements, stream_);
}

void GpuDevice::list_matrices(std::span<const exec::Matrix> matrices) {
  low_rank_.matrices.clear();
  for (const exec::Matrix& each : matrices) {
    low_rank_.matrices.push_back({.of = each.of,
                                  .x = each.array.x,
                                  .y = each.array.y,
                                  .span_feedback = array_feedback_[each.array.index].span_feedback,
                                  .p = each.left,
                                  .room = low_rank_.columns + (each.left - low_rank_.room.left),
                                  .q = each.right,
                                  .own_q = each.own_right,
                                  .scales = low_rank_.scales + 2 * low_rank_.matrices.size()});
    if (feedback_ == nullptr) continue;
    const GpuFeedback::DeviceKey& key = *table_->keys[each.in_memory.key];
    const std::size_t begin = each.in_memory.begin;
    low_rank_.matrices.back().memory = {{key.memory[0] + begin, key.memory[1] + begin},
                                        key.key_state};
  }
}

void GpuDevice::make_left(std::span<const exec::Matrix> matrices) {
  if (feedback_ != nullptr) remember(matrices);
  list_matrices(matrices);
  const int all = count(low_rank_.matrices);
  check(api_, api_.start_factor(low_rank_.matrices.data(), all, stream_), "starting factors");
  check(api_, api_.left_factor(low_rank_.matrices.data(), all, stream_), "making left factors");
}

// It checks only the left factors, since any NaN or Inf of a matrix is in these.
bool GpuDevice::make_right(std::span<const exec::Matrix>) {
  const int all = count(low_rank_.matrices);
  check(api_, api_.check_finite(low_rank_.room.left, low_rank_.left, flags_, stream_),
        "looking for NaN");
  check(api_, api_.orthonormalise(low_rank_.matrices.data(), all, stream_), "orthonormalising");
  check(api_, api_.right_factor(low_rank_.matrices.data(), all, stream_), "making right factors");
  check(api_,
        api_.copy(low_rank_.room.right, low_rank_.room.own_right, 4 * low_rank_.right,
                  CopyKind::kOnDevice, stream_),
        "cudaMemcpyAsync");
  return true;
}

void GpuDevice::multiply(std::span<const exec::Matrix>) {
  const int all = count(low_rank_.matrices);
  const double factor = averages() ? 1.0 / program_.request().size : 1.0;
  check(api_, api_.take_headroom(low_rank_.matrices.data(), all, stream_), "scaling factors");
  check(api_, api_.product(low_rank_.matrices.data(), all, static_cast<float>(factor), stream_),
        "multiplying factors");
  check(api_, api_.remember(low_rank_.matrices.data(), all, stream_), "remembering factors");
}

}  // namespace gradwire::cuda
