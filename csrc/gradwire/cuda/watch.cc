#include "gradwire/cuda/watch.h"

#include <chrono>

#include "gradwire/base/error.h"

namespace gradwire::cuda {
namespace {

constexpr std::chrono::milliseconds kEcho{1000};
constexpr std::chrono::milliseconds kLook{10};  // between two looks at what runs

std::string text_of(const exec::Request& request, const std::vector<std::uint64_t>& counts) {
  OpSpec spec;
  spec.collective = request.collective;
  spec.dtype = request.dtype;
  spec.op = request.op;
  spec.root = request.root;
  const bool known_to_all = request.collective != Collective::kGather &&
                            request.collective != Collective::kScatter &&
                            request.collective != Collective::kAllToAll;
  if (known_to_all) spec.counts = counts;
  spec.algorithm = request.schedule != nullptr ? request.schedule->name : request.algorithm;
  spec.schedule_digest = request.schedule_digest;
  spec.codec = request.codec ? request.codec->name() : "none";
  return "nothing, for " + spec.to_string() + " on GPUs";
}

}  // namespace

Watch::Watch(Communicator& gpu, exec::Communicator& side, exec::Communicator& users)
    : gpu_(gpu),
      side_(side),
      users_(users),
      nothing_(static_cast<std::size_t>(side.identity().size)),
      thread_([this](const std::stop_token& stop) { loop(stop); }) {}

Watch::~Watch() = default;

void Watch::require_alive() const {
  const std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
}

void Watch::run(const exec::Request& request, Feedback* feedback, Stream stream) {
  require_alive();
  gpu_.require_valid(request, feedback);
  try {
    begin(request);
  } catch (...) {  // the failure of an earlier call, which the side tells before the thread does
    std::unique_lock lock(mutex_);
    fail(lock, std::current_exception());
    std::rethrow_exception(failure_);
  }
  try {
    const std::lock_guard lock(enqueuing_);
    gpu_.run(request, feedback, stream);
    end(stream);
  } catch (...) {
    // Another rank's failure may show here first, as an echo: its cause comes by the side.
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kEcho, [this] { return failure_ != nullptr; });
    fail(lock, std::current_exception());
    std::rethrow_exception(failure_);
  }
}

void Watch::begin(const exec::Request& request) {
  Running running;
  running.timeout = request.timeout;
  begin_companion(request, running);
  const std::lock_guard lock(mutex_);
  running_.push_back(std::move(running));
  changed_.notify_all();
}

void Watch::end(Stream stream) {
  std::uint64_t capture = 0;
  check(gpu_.api(), gpu_.api().capture_of(stream, &capture), "cudaStreamGetCaptureInfo");
  const std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
  Running& running = running_.back();
  running.enqueued = true;
  if (capture != 0) return;
  const OnDevice here(gpu_.api(), gpu_.device());
  if (spare_.empty()) spare_.push_back(std::make_unique<OwnedEvent>(gpu_.api()));
  running.end = std::move(spare_.back());
  spare_.pop_back();
  check(gpu_.api(), gpu_.api().record(running.end->get(), stream), "cudaEventRecord");
}

void Watch::begin_companion(const exec::Request& request, Running& running) {
  std::vector<std::uint64_t> counts;
  exec::Operation::counts(request, side_.identity().rank, side_.identity().size, counts);
  running.text = text_of(request, counts);
  if (side_.identity().size == 1) return;
  exec::Request companion;
  companion.collective = Collective::kAllGather;
  companion.dtype = DType::kUInt8;
  companion.algorithm = "direct";
  companion.codec_label = running.text;
  companion.inputs = {nothing_.data(), 1};
  companion.outputs = nothing_;
  companion.timeout = request.timeout;
  running.companion = side_.submit(companion);
}

void Watch::finish(double timeout) {
  std::unique_lock lock(mutex_);
  const Deadline deadline = Deadline::after(timeout);
  while (!running_.empty() && !failure_) {
    if (deadline.passed()) throw Timeout("calls on a GPU are not over", kNoPeer);
    changed_.wait_for(lock, kLook);
  }
  if (failure_) std::rethrow_exception(failure_);
}

void Watch::abort(const std::string& reason) noexcept {
  side_.abort(reason);
  gpu_.abort();
}

// ---- The thread --------------------------------------------------------------------------------

void Watch::loop(const std::stop_token& stop) {
  gpu_.api().set_device(gpu_.device());
  gpu_.api().relax_captures();
  std::unique_lock lock(mutex_);
  while (!stop.stop_requested()) {
    changed_.wait(lock, stop, [this] { return !running_.empty() && !failure_; });
    if (stop.stop_requested()) return;
    try {
      look(lock);
    } catch (...) {
      if (!lock.owns_lock()) lock.lock();
      fail(lock, std::current_exception());
    }
    changed_.wait_for(lock, stop, kLook, [] { return false; });
  }
}

void Watch::look(std::unique_lock<std::mutex>& lock) {
  for (Running& each : running_)
    if (each.companion && each.companion->done()) each.companion->rethrow();
  while (!running_.empty() && is_over(running_.front())) {
    if (running_.front().end) spare_.push_back(std::move(running_.front().end));
    running_.pop_front();
    check_flags();
    changed_.notify_all();
  }
  if (running_.empty()) return;
  Running& front = running_.front();
  if (front.deadline.is_never()) front.deadline = Deadline::after(front.timeout);
  const bool all_here = !front.companion || front.companion->done();
  const bool late = front.enqueued && all_here && front.deadline.passed();
  if (late)
    throw Timeout("rank " + std::to_string(side_.identity().rank) + ": " + front.text +
                      ": all ranks have made the call, but this GPU did not finish it within " +
                      std::to_string(front.timeout) +
                      " s; is its device, or the network between "
                      "GPUs, all right?",
                  side_.identity().rank);
  lock.unlock();
  side_.hear(0);
  users_.hear(0);
  if (const std::unique_lock idle(enqueuing_, std::try_to_lock); idle) gpu_.check_messages();
  lock.lock();
}

bool Watch::is_over(const Running& running) const {
  if (!running.enqueued || (running.companion && !running.companion->done())) return false;
  if (!running.end) return true;
  int done = 0;
  check(gpu_.api(), gpu_.api().query(running.end->get(), &done), "cudaEventQuery");
  return done != 0;
}

void Watch::check_flags() {
  if ((gpu_.take_flags() & kRefused) == 0) return;
  throw TransportError("rank " + std::to_string(side_.identity().rank) +
                           ": a payload that came from another rank's GPU can't be decoded",
                       kNoPeer);
}

// With the lock.
void Watch::fail(std::unique_lock<std::mutex>& lock, const std::exception_ptr& error) noexcept {
  if (failure_) return;
  failure_ = error;
  changed_.notify_all();
  lock.unlock();
  gpu_.abort();
  side_.fail_with(error);
  users_.fail_with(error);
  lock.lock();
}

}  // namespace gradwire::cuda
