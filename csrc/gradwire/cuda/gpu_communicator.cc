#include "gradwire/cuda/gpu_communicator.h"

#include <algorithm>

#include "gradwire/base/error.h"
#include "gradwire/cuda/gpu_gather_reduce.h"
#include "gradwire/cuda/gpu_lowrank.h"
#include "gradwire/cuda/gpu_native.h"
#include "gradwire/cuda/model.h"
#include "gradwire/exec/compound/lowrank_reduce.h"
#include "gradwire/exec/plan/gather_algorithm.h"

namespace gradwire::cuda {
namespace {

// A plan's frames are whole chunks here, whatever their length.
constexpr std::size_t kUnlimited = std::size_t{1} << 60;

exec::PlanCache::Setting plans_of(const Communicator::Setting& setting) {
  return {setting.rank, setting.size, setting.hosts, kUnlimited, kUnlimited};
}

bool is_plain(const exec::Request& request) {
  return !request.codec || request.codec->combine() == codec::Combine::kPlain;
}

// Returns whether a call gathers payloads, where no kernel makes all of it. By "auto" only two
// ranks do: most transports between GPUs send payloads whole, so that gathering those of several
// peers does not pay.
bool gathers(const exec::Request& request, int size) {
  const bool shared = request.collective == Collective::kAllReduce;
  if (exec::is_gather(request.algorithm)) return !(is_plain(request) && shared);
  return request.algorithm == "auto" && request.schedule == nullptr && !is_plain(request) &&
         shared && size == 2 && request.codec->gathers(size);
}

// Throws for an algorithm that cannot gather, as exec/plan/gather_algorithm.h does.
void require_gathers(const exec::Request& request) {
  if (is_plain(request))
    throw ScheduleError(std::string(name_of(request.collective)) + " by '" +
                        std::string(request.algorithm) + "': without codec only all_reduce " +
                        "gathers; use auto" + (reduces(request.collective) ? ", or a codec" : ""));
  exec::gather_algorithm(request);
}

void check_types(const exec::Request& request) {
  if (request.payloads)
    throw InvalidArgument("codec '" + std::string(request.codec_label) +
                          "' is written in Python and works on arrays in host memory: copy them "
                          "there, or take one of gradwire.codecs()");
  OpSpec spec;
  spec.collective = request.collective;
  spec.dtype = request.dtype;
  spec.op = request.op;
  if (request.codec) exec::Plan::check_types(spec, *request.codec);
}

}  // namespace

Communicator::Communicator(const Api& api, Setting setting, std::unique_ptr<Messages> messages)
    : api_(api),
      setting_(std::move(setting)),
      messages_(std::move(messages)),
      plans_(plans_of(setting_)),
      main_(api, {setting_.rank, setting_.size, messages_.get(), &plans_}),
      vote_(api, {setting_.rank, setting_.size, messages_.get(), &plans_}),
      flags_room_(api),
      own_key_states_(api),
      codec_scratch_(api),
      told_room_(api, Room::Kind::kPinned),
      last_(api),
      last_captured_(api) {
  plans_.set_model(gpu_model());
  flags_ = reinterpret_cast<std::uint32_t*>(flags_room_.take(kPayloadAlignment));
  constexpr std::size_t kBytes = 2 * sizeof(std::uint32_t);
  std::fill_n(told_room_.take(kBytes), kBytes, std::byte{0});
  told_ = reinterpret_cast<std::uint32_t*>(told_room_.data());
  lost_ = told_ + 1;
  messages_->tell_losses(lost_);
}

// Enqueued work uses this memory. It ends when its messages do, or when they are aborted.
Communicator::~Communicator() {
  if (messages_->rest())
    messages_.reset();
  else
    messages_.release();  // leaked: something may still refer to it
  await_device(api_, setting_.device);
}

void Communicator::run(const exec::Request& request, Feedback* feedback, Stream stream) {
  const OnDevice here(api_, setting_.device);
  require_valid(request, feedback);
  enqueue(request, feedback, {stream, capture_of(api_, stream), nullptr});
}

void Communicator::enqueue(const exec::Request& request, Feedback* feedback, const Place& place) {
  messages_->check();
  const Stream stream = place.stream;
  Call& call = call_;
  call.request = &request;
  call.stream = stream;
  call.feedback = feedback;
  call.codec = nullptr;
  call.captured = place.capture != 0;
  exec::extent_counts(request, setting_.rank, setting_.size, call.counts);
  // An event that was recorded in one capture means nothing in another capture, or outside.
  const Event last = call.captured ? last_captured_.get() : latest_;
  if (call.captured ? place.capture == last_capture_ : last != nullptr)
    check(api_, api_.wait(stream, last), "cudaStreamWaitEvent");
  const bool lowrank = request.codec && request.codec->combine() == codec::Combine::kCompound;
  if (lowrank) {
    if (!lowrank_) lowrank_ = std::make_unique<LowRankReduce>(*this);
    lowrank_->run(call);
  } else if (is_native(request, setting_.size, *messages_, feedback)) {
    if (!native_) native_ = std::make_unique<NativeCall>(*this);
    native_->run(call);
  } else if (gathers(request, setting_.size)) {
    if (!gather_) gather_ = std::make_unique<GatherReduce>(*this);
    gather_->run(call);
  } else {
    run_at_once(call);
  }
  if (!call.captured && call.codec != nullptr)
    check(api_, api_.add_flags(call.flags, told_, stream), "telling a call's flags");
  const Event end = call.captured          ? last_captured_.get()
                    : place.end != nullptr ? place.end
                                           : last_.get();
  check(api_, api_.record(end, stream), "cudaEventRecord");
  if (call.captured)
    last_capture_ = place.capture;
  else
    latest_ = end;
  ++operations_;
  count_sent();
}

void Communicator::count_sent() {
  std::uint64_t sent = main_.sent() + vote_.sent();
  if (gather_) sent += gather_->sent();
  if (lowrank_) sent += lowrank_->sent();
  if (native_) sent += native_->sent();
  sent_ = sent;
}

void Communicator::require_valid(const exec::Request& request, const Feedback* feedback) {
  check_types(request);
  exec::check_arrays(request, setting_.rank, setting_.size);
  if (feedback != nullptr) feedback->require_fits(request.keys);
  if (request.codec && request.codec->combine() == codec::Combine::kCompound)
    exec::check_lowrank(request);
  else if (is_native(request, setting_.size, *messages_, feedback))
    return;
  else if (gathers(request, setting_.size))
    require_gathers(request);
  else
    plans_.find(chosen(request), {});
}

std::uint32_t Communicator::take_flags() { return std::atomic_ref(*told_).exchange(0); }

// ---- What every kind of call begins with --------------------------------------------------------

// All calls of a step share one word of flags.
void Communicator::begin(Call& call) {
  const bool in_step = call.feedback != nullptr && call.feedback->in_step();
  call.flags = in_step ? call.feedback->step_flags() : flags_;
  const bool is_flagged = call.feedback != nullptr || !is_plain(*call.request);
  if (is_flagged && !in_step)
    check(api_, api_.fill(call.flags, 0, sizeof(std::uint32_t), call.stream), "cudaMemsetAsync");
  call.codec = codec_for(call.request->codec);
  const std::size_t scratch =
      call.codec == nullptr ? 0 : call.codec->scratch_bytes(std::span(call.counts));
  call.scratch = codec_scratch_.take(scratch, call.captured);
}

const Codec* Communicator::codec_for(const std::shared_ptr<const codec::Codec>& codec) {
  using codec::Combine;
  if (!codec || codec->combine() == Combine::kPlain || codec->combine() == Combine::kCompound)
    return nullptr;
  auto& made = codecs_[codec];
  if (!made) made = Codec::make(api_, *codec);
  return made.get();
}

void Communicator::bind_feedback(Call& call) {
  call.extent_feedback.assign(call.counts.size(), {});
  call.table = nullptr;
  if (call.feedback != nullptr) return bind_keys(call);
  if (call.codec == nullptr) return;
  for (ExtentFeedback& each : call.extent_feedback)
    each.call = operations_ ^ static_cast<std::uint64_t>(setting_.rank) << 48;
  if (!call.codec->adapts()) return;
  const std::size_t bytes = sizeof(KeyState) * call.counts.size();
  auto* key_state = reinterpret_cast<KeyState*>(own_key_states_.take(bytes, call.captured));
  check(api_, api_.fill(key_state, 0, bytes, call.stream), "cudaMemsetAsync");
  for (ExtentFeedback& each : call.extent_feedback) each.run_feedback.key_state = key_state++;
}

void Communicator::bind_keys(Call& call) {
  const auto& keys = call.request->keys;
  exec::find_key_offsets(call.counts, keys, call.keys);
  call.table = &call.feedback->open(keys, call.captured, call.stream);
  for (std::size_t i = 0; i < call.extent_feedback.size(); ++i) {
    const auto [key, begin] = call.keys[i];
    const Feedback::Key& its = *call.table->keys[key];
    call.extent_feedback[i].run_feedback = its.run_feedback(begin);
    call.extent_feedback[i].call = its.digest ^ static_cast<std::uint64_t>(setting_.rank) << 48;
    call.extent_feedback[i].element = begin;
  }
}

// ---- One schedule ------------------------------------------------------------------------------

// Takes `direct` for codecs where the library between the GPUs makes it in two operations, whatever
// the model says; hosts of several GPUs are left to the model, which joins them first.
exec::Request Communicator::chosen(const exec::Request& request) const {
  exec::Request made = request;
  const bool one_level =
      setting_.hosts.size() <= 1 ||
      std::ranges::all_of(setting_.hosts, [](const auto& each) { return each.size() == 1; });
  if (request.algorithm == "auto" && request.schedule == nullptr && !is_plain(request) &&
      request.collective == Collective::kAllReduce && one_level && messages_->has_collectives())
    made.algorithm = "direct";
  return made;
}

void Communicator::run_at_once(Call& call) {
  main_.bind(chosen(*call.request), call.captured);
  begin(call);
  bind_feedback(call);
  main_.begin(call.stream);
  const exec::BufferMap& buffer_map = main_.buffer_map();
  if (call.codec != nullptr)
    prepare(call, buffer_map.extents());
  else if (call.feedback != nullptr)
    deliver_residuals(call, buffer_map);
  main_.run({call.codec, call.extent_feedback, call.scratch, call.flags}, {}, call.stream);
  if (call.codec != nullptr) adapt(call);
  if (call.feedback == nullptr) return;
  if (call.codec == nullptr) check_results(call, buffer_map);
  settle(call, call.request->collective == Collective::kAllReduce);
}

void Communicator::prepare(const Call& call, std::span<std::byte* const> extents) {
  if (!call.codec->adapts()) return;
  for (std::size_t i = 0; i < extents.size(); ++i) {
    Run run;
    run.x = reinterpret_cast<const float*>(extents[i]);
    run.n = call.counts[i];
    run.run_feedback = call.extent_feedback[i].run_feedback;
    call.codec->prepare(run, call.scratch, call.stream);
  }
}

// Adapts each key once, even where several extents belong to it.
void Communicator::adapt(const Call& call) {
  if (!call.codec->adapts()) return;
  std::uint64_t elements = 0;
  for (std::size_t i = 0; i < call.extent_feedback.size(); ++i) {
    elements += call.counts[i];
    KeyState* const key_state = call.extent_feedback[i].run_feedback.key_state;
    if (i + 1 < call.extent_feedback.size() &&
        call.extent_feedback[i + 1].run_feedback.key_state == key_state)
      continue;
    call.codec->adapt(elements, key_state, call.stream);
    elements = 0;
  }
}

// Adds the residuals to the arrays and clears them, since a plain sum loses nothing.
void Communicator::deliver_residuals(const Call& call, const exec::BufferMap& buffer_map) {
  const auto& own = main_.plan().folds() ? buffer_map.addends() : buffer_map.extents();
  std::vector<Run> runs(own.size());
  for (std::size_t i = 0; i < own.size(); ++i) {
    runs[i].x = runs[i].y = reinterpret_cast<float*>(own[i]);
    runs[i].n = call.counts[i];
    runs[i].run_feedback = call.extent_feedback[i].run_feedback;
  }
  check(api_, api_.deliver_runs(runs.data(), static_cast<int>(runs.size()), call.stream),
        "delivering");
}

void Communicator::check_results(const Call& call, const exec::BufferMap& buffer_map) {
  const auto look = [&](std::byte* data, std::uint64_t count) {
    check(api_, api_.check_finite(reinterpret_cast<float*>(data), count, call.flags, call.stream),
          "looking for NaN");
  };
  if (main_.plan().folds())
    for (const exec::Array& each : buffer_map.sums()) look(each.data, each.count);
  else
    for (std::size_t i = 0; i < call.counts.size(); ++i)
      look(buffer_map.extents()[i], call.counts[i]);
}

void Communicator::settle(const Call& call, bool shared, bool remembers) {
  if (call.table == nullptr) return;
  const auto look_for_failure = [&] {
    check(api_, api_.add_flags(lost_, call.flags, call.stream), "looking for a failure");
  };
  look_for_failure();
  if (!shared) {
    vote_finite(call);
    look_for_failure();  // the vote itself may have failed
    poison(call);
  }
  call.feedback->settle(*call.table, remembers, call.flags, call.stream);
}

// Lets ranks that hold different results agree whether the new residuals are kept.
void Communicator::vote_finite(const Call& call) {
  const exec::Array word{reinterpret_cast<std::byte*>(call.flags), 1};
  exec::Request question;
  question.collective = Collective::kAllReduce;
  question.dtype = DType::kInt32;
  question.op = ReduceOp::kMax;
  question.inputs = question.outputs = {&word, 1};
  vote_.bind(question, call.captured);
  vote_.begin(call.stream);
  vote_.run({}, {}, call.stream);
}

void Communicator::poison(const Call& call) {
  std::vector<Run> runs;
  for (const exec::Array& each : call.request->outputs)
    runs.push_back({.y = reinterpret_cast<float*>(each.data), .n = each.count});
  check(api_, api_.poison(runs.data(), static_cast<int>(runs.size()), call.flags, call.stream),
        "poisoning");
}

}  // namespace gradwire::cuda
