#include "gradwire/cuda/gpu_watch.h"

#include <chrono>

#include "gradwire/base/error.h"
#include "gradwire/base/op.h"

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
  spec.moved = request.moved;
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
  const OnDevice here(gpu_.api(), gpu_.device());
  require_alive();
  gpu_.require_valid(request, feedback);
  exec::extent_counts(request, side_.identity().rank, side_.identity().size, counts_);
  std::string text = text_of(request, counts_);
  const bool captured = capture_of(gpu_.api(), stream) != 0;
  learn(request, text, feedback, captured);
  try {
    begin(request, std::move(text));
  } catch (...) {  // the failure of an earlier call, which the side tells before the thread does
    std::unique_lock lock(mutex_);
    fail(lock, std::current_exception());
    std::rethrow_exception(failure_);
  }
  try {
    const std::lock_guard lock(enqueuing_);
    if (!captured) mark(&Running::start, stream);
    gpu_.run(request, feedback, stream);
    if (!captured) mark(&Running::end, stream);
    finish_enqueuing();
  } catch (const Error&) {
    // Another rank's failure may show here first, as an echo: its cause comes by the side.
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kEcho, [this] { return failure_ != nullptr; });
    fail(lock, std::current_exception());
    std::rethrow_exception(failure_);
  } catch (...) {  // Ctrl-C: for who pressed it, and an abort for everybody else
    std::unique_lock lock(mutex_);
    fail(lock, std::make_exception_ptr(Aborted("rank " + std::to_string(side_.identity().rank) +
                                                   " was interrupted in a call on its GPU",
                                               side_.identity().rank)));
    throw;
  }
}

// In a capture nothing can be allocated, nor a peer met for the first time. To find that out in the
// middle of a call would be the end of the communicator.
void Watch::learn(const exec::Request& request, const std::string& text, const Feedback* feedback,
                  bool captured) {
  constexpr std::size_t kMost = 10000;  // of those beyond nothing is known
  Fnv1a hash;
  hash.text(text).number(feedback == nullptr ? 0 : feedback->number());
  for (std::uint64_t each : counts_) hash.number(each);
  for (const auto& each : request.keys) hash.text(each.key).number(each.count);
  for (const exec::Shape& each : request.shapes) hash.number(each.rows).number(each.columns);
  const std::uint64_t call = hash.digest();
  if (made_.size() >= kMost || made_.contains(call)) return;
  if (captured)
    throw InvalidArgument(
        "a call that is captured in a CUDA graph was not made before: make the same call once "
        "before the capture begins");
  made_.insert(call);
}

void Watch::begin(const exec::Request& request, std::string text) {
  Running running;
  running.timeout = request.timeout;
  running.text = std::move(text);
  if (side_.identity().size > 1) running.companion = submit_companion(request, running.text);
  const std::lock_guard lock(mutex_);
  running_.push_back(std::move(running));
  changed_.notify_all();
}

std::shared_ptr<exec::Work> Watch::submit_companion(const exec::Request& request,
                                                    const std::string& text) {
  exec::Request companion;
  companion.collective = Collective::kAllGather;
  companion.dtype = DType::kUInt8;
  companion.algorithm = "direct";
  companion.codec_label = text;
  companion.inputs = {nothing_.data(), 1};
  companion.outputs = nothing_;
  companion.timeout = request.timeout;
  return side_.submit(companion);
}

void Watch::mark(std::unique_ptr<OwnedEvent> Running::* event, Stream stream) {
  std::unique_lock lock(mutex_);
  if (spare_.empty()) spare_.push_back(std::make_unique<OwnedEvent>(gpu_.api()));
  auto taken = std::move(spare_.back());
  spare_.pop_back();
  lock.unlock();  // a stream that is full waits until the thread ends what is on it
  check(gpu_.api(), gpu_.api().record(taken->get(), stream), "cudaEventRecord");
  lock.lock();
  running_.back().*event = std::move(taken);
}

void Watch::finish_enqueuing() {
  const std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
  running_.back().enqueued = true;
}

void Watch::finish(double timeout) {
  std::unique_lock lock(mutex_);
  const Deadline deadline = Deadline::after(timeout);
  while (!running_.empty() && !failure_) {
    if (deadline.passed()) throw Timeout("timed out: calls on a GPU are not over", kNoPeer);
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
    for (auto* each : {&running_.front().start, &running_.front().end})
      if (*each) spare_.push_back(std::move(*each));
    running_.pop_front();
    check_flags();
    changed_.notify_all();
  }
  if (running_.empty()) return;
  require_in_time(running_.front());
  lock.unlock();
  side_.hear(0);
  users_.hear(0);
  check_messages();
  lock.lock();
}

// Another rank's failure may show here first, as an echo.
void Watch::check_messages() {
  try {
    if (const std::unique_lock idle(enqueuing_, std::try_to_lock); idle) gpu_.check_messages();
  } catch (const Error&) {
    constexpr double kTurn = 0.02;
    for (const auto echo = Deadline::after(std::chrono::duration<double>(kEcho).count());
         !echo.passed();) {
      side_.hear(kTurn);
      users_.hear(kTurn);
    }
    throw;
  }
}

// The stream has that long to come to the call, and then that long for it.
void Watch::require_in_time(Running& front) const {
  const bool all_here = !front.companion || front.companion->done();
  const bool is_known = front.start || front.enqueued;
  if (!front.has_started && is_known && has_passed(front.start)) {
    front.has_started = true;
    front.deadline = Deadline::never();
  }
  if (front.deadline.is_never()) front.deadline = Deadline::after(front.timeout);
  if (!front.enqueued || !all_here || !front.deadline.passed()) return;
  const Rank rank = side_.identity().rank;
  const std::string seconds = std::to_string(front.timeout) + " s";
  const std::string what = "rank " + std::to_string(rank) + ": " + front.text + " timed out: ";
  if (!front.has_started)
    throw Timeout(what + "this GPU did not come to the call within " + seconds +
                      ": what was enqueued before it is not over",
                  rank);
  throw Timeout(what + "all ranks have made the call, but this GPU did not finish it within " +
                    seconds + "; is its device, or the network between GPUs, all right?",
                rank);
}

bool Watch::is_over(const Running& running) const {
  if (!running.enqueued || (running.companion && !running.companion->done())) return false;
  return has_passed(running.end);
}

bool Watch::has_passed(const std::unique_ptr<OwnedEvent>& event) const {
  if (!event) return true;
  int done = 0;
  check(gpu_.api(), gpu_.api().query(event->get(), &done), "cudaEventQuery");
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
  users_.fail_with(error);
  side_.fail_with(error);
  lock.lock();
}

}  // namespace gradwire::cuda
