#include "gradwire/cuda/gpu_communicator.h"

#include <algorithm>

#include "gradwire/cuda/model.h"

namespace gradwire::cuda {
namespace {

// A plan's frames are whole chunks here, whatever their length.
constexpr std::size_t kUnlimited = std::size_t{1} << 60;

exec::PlanCache::Setting plans_of(const GpuIdentity& identity) {
  return {identity.rank, identity.size, identity.hosts, kUnlimited, kUnlimited};
}

}  // namespace

GpuCommunicator::GpuCommunicator(const Api& api, GpuIdentity identity,
                                 std::unique_ptr<Messages> messages)
    : api_(api),
      identity_(std::move(identity)),
      messages_(std::move(messages)),
      plans_(plans_of(identity_)),
      calls_(api, identity_.rank, identity_.size, *messages_, plans_),
      last_(api),
      last_captured_(api) {
  plans_.set_model(gpu_model());
}

// Enqueued work uses this memory. It ends when its messages do, or when they are aborted.
GpuCommunicator::~GpuCommunicator() {
  if (messages_->rest())
    messages_.reset();
  else
    messages_.release();  // leaked: something may still refer to it
  await_device(api_, identity_.device);
}

void GpuCommunicator::run(exec::Request request, GpuFeedback* feedback, Stream stream) {
  const OnDevice here(api_, identity_.device);
  bind(request, feedback, {stream, capture_of(api_, stream)});
  enqueue();
}

void GpuCommunicator::bind(exec::Request& request, GpuFeedback* feedback,
                           const CallStream& stream) {
  request.rank = identity_.rank;
  request.size = identity_.size;
  if (!identity_.has_sites) request.codec = plans_.codec_for(request);
  exec::check_arrays(request);
  if (feedback != nullptr) feedback->require_fits(request.keys);
  const bool one_level =
      identity_.hosts.size() <= 1 ||
      std::ranges::all_of(identity_.hosts, [](const auto& each) { return each.size() == 1; });
  const exec::Decision decision =
      exec::decide(request, feedback != nullptr,
                   {true, messages_->has_collectives(), one_level, messages_->name()});
  calls_.bind(request, decision, feedback, stream);
}

void GpuCommunicator::enqueue(Event end) {
  messages_->check();
  const CallStream& stream = calls_.stream();
  // An event that was recorded in one capture means nothing in another capture, or outside.
  const bool captured = stream.is_captured();
  const Event last = captured ? last_captured_.get() : latest_;
  if (captured ? stream.capture == last_capture_ : last != nullptr)
    check(api_, api_.wait(stream, last), "cudaStreamWaitEvent");
  calls_.run();
  if (captured || end == nullptr) end = captured ? last_captured_.get() : last_.get();
  check(api_, api_.record(end, stream), "cudaEventRecord");
  if (captured)
    last_capture_ = stream.capture;
  else
    latest_ = end;
  sent_ = calls_.sent();
}

}  // namespace gradwire::cuda
