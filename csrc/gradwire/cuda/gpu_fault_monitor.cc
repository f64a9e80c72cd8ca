#include "gradwire/cuda/gpu_fault_monitor.h"

#include <chrono>
#include <future>
#include <utility>

#include "gradwire/base/error.h"
#include "gradwire/base/op.h"

namespace gradwire::cuda {
namespace {

// Counts a waiting thread. Made and destroyed under the mutex.
class WaiterCount {
 public:
  WaiterCount(int& waiters, std::condition_variable_any& changed) : waiters_(waiters) {
    ++waiters_;
    changed.notify_all();
  }
  ~WaiterCount() { --waiters_; }
  WaiterCount(const WaiterCount&) = delete;
  WaiterCount& operator=(const WaiterCount&) = delete;

 private:
  int& waiters_;
};

// Releases a lock for its scope.
class ReleasedLock {
 public:
  explicit ReleasedLock(std::unique_lock<std::mutex>& lock) : lock_(lock) { lock_.unlock(); }
  ~ReleasedLock() { lock_.lock(); }
  ReleasedLock(const ReleasedLock&) = delete;
  ReleasedLock& operator=(const ReleasedLock&) = delete;

 private:
  std::unique_lock<std::mutex>& lock_;
};

constexpr double kRootCauseSeconds = 1;
constexpr double kCheckSeconds = 0.01;
constexpr std::chrono::duration<double> kCheckInterval{kCheckSeconds};
constexpr double kLeastRest = 1;  // seconds

std::string text_of(const exec::Request& request, const std::vector<std::uint64_t>& counts) {
  OpSpec spec = exec::spec_of(request);
  if (exec::counts_known_to_all(request.collective)) spec.counts = counts;
  return spec.to_string() + " on GPUs";
}

}  // namespace

// Which of the oldest calls have reached the device, and have ended there.
struct GpuFaultMonitor::EventQuery {
  std::vector<Event> ends;  // null: of a captured call, which has none
  Event start = nullptr;    // of the first one; null: it has none
  bool knows_start = false;
  std::size_t ended = 0;
  bool has_started = false;
  Status status = 0;

  void ask(const Api& api) {
    const auto has_passed = [&](Event event) {
      int done = 1;
      if (event != nullptr && status == 0) status = api.query(event, &done);
      return done != 0;
    };
    while (ended < ends.size() && has_passed(ends[ended])) ++ended;
    has_started = ended == 0 && knows_start && has_passed(start);
  }
};

GpuFaultMonitor::GpuFaultMonitor(GpuCommunicator& gpu, exec::Communicator& shadow,
                                 exec::Communicator& users)
    : gpu_(gpu),
      shadow_(shadow),
      users_(users),
      comparison_(shadow),
      thread_([this](const std::stop_token& stop) { loop(stop); }) {}

GpuFaultMonitor::~GpuFaultMonitor() = default;

void GpuFaultMonitor::require_alive() const {
  const std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
}

void GpuFaultMonitor::require_success() {
  try {
    {
      const std::lock_guard lock(enqueuing_);
      gpu_.check_messages();
    }
    require_alive();
    const std::lock_guard lock(mutex_);
    check_flags();
  } catch (const Error&) {
    fail_with_root_cause();
  }
}

// Throws the failure of another rank, if one shows up in time: it may be the cause of the error
// that is being handled. Else rethrows that error.
void GpuFaultMonitor::throw_root_cause() {
  for (const auto deadline = Deadline::after(kRootCauseSeconds); !deadline.passed();) {
    {
      const std::lock_guard lock(mutex_);
      if (failure_) std::rethrow_exception(failure_);
      comparison_.advance(/*at_once=*/true);
    }
    shadow_.check_failure(kCheckSeconds);
    users_.check_failure(kCheckSeconds);
  }
  throw;
}

void GpuFaultMonitor::fail_with_root_cause() {
  try {
    throw_root_cause();
  } catch (...) {
    std::unique_lock lock(mutex_);
    fail(lock, std::current_exception());
    std::rethrow_exception(failure_);
  }
}

void GpuFaultMonitor::run(exec::Request request, GpuFeedback* feedback, Stream stream) {
  const OnDevice here(gpu_.api(), gpu_.device());
  const std::lock_guard calling(calling_);
  require_alive();
  const CallStream on{stream, capture_of(gpu_.api(), stream)};
  const bool captured = on.is_captured();
  gpu_.bind(request, feedback, on);
  exec::array_counts(request, counts_);
  std::string text = text_of(request, counts_);
  require_made_before(request, text, feedback, captured);
  if (captured) text += ", captured in a CUDA graph";
  begin(request, std::move(text), captured);
  try {
    const std::lock_guard lock(enqueuing_);
    enqueue(on);
  } catch (const Error&) {
    fail_with_root_cause();
  } catch (...) {  // Ctrl-C: rethrown here, and an abort for all other ranks
    std::unique_lock lock(mutex_);
    fail(lock, std::make_exception_ptr(Aborted("rank " + std::to_string(shadow_.identity().rank) +
                                                   " was interrupted in a call on its GPU",
                                               shadow_.identity().rank)));
    throw;
  }
}

// Throws for a captured call that was not made before the capture. A capture can neither allocate
// nor connect to a peer for the first time; to find that out in the middle of a call would end the
// communicator.
void GpuFaultMonitor::require_made_before(const exec::Request& request, const std::string& text,
                                          const GpuFeedback* feedback, bool captured) {
  constexpr std::size_t kMost = 10000;  // later calls are not checked
  Fnv1a hash;
  hash.text(text).number(feedback == nullptr ? 0 : feedback->number());
  for (std::uint64_t each : counts_) hash.number(each);
  for (const auto& each : request.keys) hash.text(each.key).number(each.count);
  for (const exec::Shape& each : request.shapes) hash.number(each.rows).number(each.columns);
  const std::uint64_t call = hash.digest();
  if (calls_made_.size() >= kMost || calls_made_.contains(call)) return;
  if (captured)
    throw InvalidArgument(
        "a call that is captured in a CUDA graph was not made before: make the same call once "
        "before the capture begins");
  calls_made_.insert(call);
}

void GpuFaultMonitor::begin(const exec::Request& request, std::string text, bool captured) {
  std::unique_lock lock(mutex_);
  while (comparison_.made() - comparison_.compared() >= kMostAhead && !failure_)
    changed_.wait_for(lock, kCheckInterval);
  if (failure_) std::rethrow_exception(failure_);
  Running running;
  running.timeout = request.timeout;
  running.text = text;
  has_captured_ = has_captured_ || captured;
  comparison_.add(std::move(text), request.timeout, users_.stop_requested(),
                  users_.resize_requested());
  running.number = comparison_.made();
  running_.push_back(std::move(running));
  changed_.notify_all();
}

std::unique_ptr<OwnedEvent> GpuFaultMonitor::take_event() {
  std::unique_lock lock(mutex_);
  if (!spare_.empty()) {
    auto taken = std::move(spare_.back());
    spare_.pop_back();
    return taken;
  }
  lock.unlock();
  return std::make_unique<OwnedEvent>(gpu_.api());
}

// Enqueues without the lock: record() may wait on a full stream until the thread ends its work.
void GpuFaultMonitor::enqueue(const CallStream& stream) {
  std::unique_ptr<OwnedEvent> end;
  if (!stream.is_captured()) {
    auto start = take_event();
    check(gpu_.api(), gpu_.api().record(start->get(), stream), "cudaEventRecord");
    const std::lock_guard lock(mutex_);
    running_.back().start = std::move(start);
  }
  if (!stream.is_captured()) end = take_event();
  gpu_.enqueue(end ? end->get() : nullptr);
  const std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
  running_.back().end = std::move(end);
  running_.back().enqueued = true;
}

void GpuFaultMonitor::finish(double timeout) {
  std::unique_lock lock(mutex_);
  const Deadline deadline = Deadline::after(timeout);
  const WaiterCount waiter(waiters_, changed_);
  while (!running_.empty() && !failure_ && !deadline.passed())
    changed_.wait_for(lock, kCheckInterval);
  if (failure_) std::rethrow_exception(failure_);
  if (!running_.empty()) throw Timeout("timed out: calls on a GPU are not over", kNoPeer);
  if (!has_captured_) return;
  try {
    await_replays(lock, deadline);
  } catch (const Error&) {
    fail(lock, std::current_exception());
    std::rethrow_exception(failure_);
  }
}

// Waits until the device has come to rest: nothing else tells that replays are over.
void GpuFaultMonitor::await_replays(std::unique_lock<std::mutex>& lock, const Deadline& deadline) {
  std::future<Status> status = synchronize_apart(gpu_.api(), gpu_.device());
  const auto is_at_rest = [&] {
    const ReleasedLock released(lock);
    shadow_.check_failure(0);
    users_.check_failure(0);
    return status.wait_for(kCheckInterval) == std::future_status::ready;
  };
  const Deadline least = Deadline::after(kLeastRest);  // to ask takes a thread
  while (!is_at_rest()) {
    if (failure_) std::rethrow_exception(failure_);
    if (deadline.passed() && least.passed())
      throw Timeout("rank " + std::to_string(shadow_.identity().rank) +
                        ": timed out: this GPU has not come to rest. Calls that were captured in a "
                        "CUDA graph wait for the other ranks: have all ranks replayed it as often?",
                    kNoPeer);
  }
  check(gpu_.api(), status.get(), "cudaDeviceSynchronize");
}

bool GpuFaultMonitor::should_stop(const WaitLimit::Interrupt& interrupt) {
  std::unique_lock lock(mutex_);
  await_counts(lock, interrupt);
  return comparison_.stops();
}

bool GpuFaultMonitor::should_resize(const WaitLimit::Interrupt& interrupt) {
  std::unique_lock lock(mutex_);
  await_counts(lock, interrupt);
  return comparison_.resizes();
}

// Waits until all ranks have made this rank's calls.
void GpuFaultMonitor::await_counts(std::unique_lock<std::mutex>& lock,
                                   const WaitLimit::Interrupt& interrupt) {
  const WaiterCount waiter(waiters_, changed_);
  while (!comparison_.all_counted() && !failure_) {
    changed_.wait_for(lock, kCheckInterval);
    if (!interrupt) continue;
    const ReleasedLock released(lock);
    interrupt();
  }
  if (failure_) std::rethrow_exception(failure_);
}

void GpuFaultMonitor::abort(const std::string& reason) noexcept {
  shadow_.abort(reason);
  gpu_.abort();
}

// ---- The thread --------------------------------------------------------------------------------

void GpuFaultMonitor::loop(const std::stop_token& stop) {
  gpu_.api().set_device(gpu_.device());
  gpu_.api().relax_captures();
  std::unique_lock lock(mutex_);
  while (!stop.stop_requested()) {
    changed_.wait(lock, stop, [this] { return !running_.empty() && !failure_; });
    if (stop.stop_requested()) return;
    try {
      check_running(lock);
    } catch (...) {
      fail(lock, std::current_exception());
    }
    rest(lock, stop);
  }
}

// Waits for the round under way, or until another may begin.
void GpuFaultMonitor::rest(std::unique_lock<std::mutex>& lock, const std::stop_token& stop) {
  constexpr auto kSeconds = std::chrono::duration<double>(CallComparison::kInterval).count();
  if (const auto pending = comparison_.pending()) {
    const ReleasedLock released(lock);
    pending->wait_for(kSeconds);
  } else {
    changed_.wait_for(lock, stop, CallComparison::kInterval, [this] {
      return comparison_.has_many_calls() || (waiters_ > 0 && !comparison_.is_over());
    });
  }
}

// Looks at failures before it asks the device for anything.
void GpuFaultMonitor::check_running(std::unique_lock<std::mutex>& lock) {
  comparison_.advance(waiters_ > 0);
  {
    const ReleasedLock released(lock);
    shadow_.check_failure(0);
    users_.check_failure(0);
    check_messages();
  }
  ask_device();
  {
    const ReleasedLock released(lock);
    constexpr std::chrono::microseconds kAnswer{1000}, kTurn{20};
    for (auto waited = kTurn; !asking_.is_over() && waited < kAnswer; waited += kTurn)
      std::this_thread::sleep_for(kTurn);
  }
  take_answer();
  if (!running_.empty()) require_in_time(running_.front());
}

// Begins a question about the calls that all ranks have made, unless one is under way. Their events
// stay for as long as they run.
void GpuFaultMonitor::ask_device() {
  if (question_ != nullptr || running_.empty()) return;
  auto question = std::make_shared<EventQuery>();
  const auto event = [](const auto& owned) { return owned ? owned->get() : nullptr; };
  const Running& front = running_.front();
  question->start = event(front.start);
  question->knows_start = front.start || front.enqueued;
  for (const Running& each : running_) {
    if (!each.enqueued || !is_made_by_all(each)) break;
    question->ends.push_back(event(each.end));
  }
  question_ = question;
  asking_.begin([question, &api = gpu_.api(), device = gpu_.device()] {
    api.set_device(device);
    api.relax_captures();
    question->ask(api);
  });
}

void GpuFaultMonitor::take_answer() {
  if (question_ == nullptr || !asking_.is_over()) return;
  const auto answer = std::exchange(question_, nullptr);
  check(gpu_.api(), answer->status, "cudaEventQuery");
  if (answer->ended > 0) {
    for (std::size_t i = 0; i < answer->ended; ++i) {
      for (auto* each : {&running_.front().start, &running_.front().end})
        if (*each) spare_.push_back(std::move(*each));
      running_.pop_front();
    }
    check_flags();
    changed_.notify_all();
    return;
  }
  Running& front = running_.front();
  if (front.has_started || !answer->has_started) return;
  front.has_started = true;
  front.deadline = Deadline::never();
}

void GpuFaultMonitor::check_messages() {
  try {
    if (const std::unique_lock idle(enqueuing_, std::try_to_lock); idle) gpu_.check_messages();
  } catch (const Error&) {
    throw_root_cause();
  }
}

// Throws Timeout where the stream takes more than `timeout` to reach the call, or again for the
// call itself.
void GpuFaultMonitor::require_in_time(Running& front) const {
  if (front.deadline.is_never()) front.deadline = Deadline::after(front.timeout);
  if (!front.enqueued || !is_made_by_all(front) || !front.deadline.passed()) return;
  const Rank rank = shadow_.identity().rank;
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

bool GpuFaultMonitor::is_made_by_all(const Running& running) const {
  return running.number <= comparison_.compared();
}

void GpuFaultMonitor::check_flags() {
  if ((gpu_.take_flags() & kRefused) == 0) return;
  throw TransportError("rank " + std::to_string(shadow_.identity().rank) +
                           ": a payload that came from another rank's GPU can't be decoded",
                       kNoPeer);
}

// The caller holds the lock, which this function releases meanwhile.
void GpuFaultMonitor::fail(std::unique_lock<std::mutex>& lock,
                           const std::exception_ptr& error) noexcept {
  if (failure_) return;
  failure_ = error;
  changed_.notify_all();
  const ReleasedLock released(lock);
  gpu_.abort();
  users_.fail_with(error);
  shadow_.fail_with(error);
}

}  // namespace gradwire::cuda
