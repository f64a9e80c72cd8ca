// Set-up of a communicator, and its calls. A call is bound to its plan on the caller's thread,
// under the mutex, so that invalid arguments throw there, before anything is sent, and the driver
// finds everything ready. communicator_driver.cc moves calls, communicator_ending.cc ends them.
#include "gradwire/exec/communicator.h"

#include <sched.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <utility>

#include "gradwire/base/error.h"
#include "gradwire/exec/control/failure.h"

namespace gradwire::exec {
namespace {

// Turns to spin where each rank has its own core, so that the awaited rank is running: they take a
// few microseconds.
constexpr unsigned kSpins = 100;

// Returns how often a rank spins: not at all where ranks share cores, since the rank that it waits
// for is not running and needs the core.
unsigned spins_of(const Identity& identity) {
  const auto ours = std::ranges::find_if(identity.hosts, [&](const std::vector<Rank>& host) {
    return std::ranges::find(host, identity.rank) != host.end();
  });
  const auto ranks =
      ours == identity.hosts.end() ? static_cast<std::size_t>(identity.size) : ours->size();
  cpu_set_t cores;
  if (::sched_getaffinity(0, sizeof cores, &cores) != 0) return 0;
  return ranks <= static_cast<std::size_t>(CPU_COUNT(&cores)) ? kSpins : 0;
}

constexpr std::size_t kLeastMessage = 4096, kMostMessage = std::size_t{1} << 30;

transport::Options link_options(const Identity& identity, const Tuning& tuning,
                                transport::Bells& bells) {
  transport::Options options;
  options.rank = identity.rank;
  options.size = identity.size;
  options.max_message = tuning.max_message;
  options.messages = std::max(16, 2 * identity.size);  // a plan stages a whole round
  options.bells = &bells;
  return options;
}

transport::Options transfer_options(const Identity& identity, const Tuning& tuning,
                                    transport::Bells& bells) {
  transport::Options options = link_options(identity, tuning, bells);
  options.max_message = std::min<std::size_t>(tuning.max_message, 64 * 1024);
  options.messages_per_peer = 4;  // a peer that does not receive holds up no other
  options.messages = std::max(4, options.messages_per_peer * (identity.size - 1));
  return options;
}

}  // namespace

Communicator::Communicator(Identity identity, Tuning tuning)
    : identity_(std::move(identity)),
      spins_(spins_of(identity_)),
      control_(identity_.rank, identity_.size, [this] { return position(); }),
      links_(link_options(identity_, tuning, control_.bells()), tuning.contexts),
      transfer_links_(transfer_options(identity_, tuning, control_.bells()), tuning.contexts),
      wakeup_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      plans_({identity_.rank, identity_.size, identity_.hosts, tuning.max_message,
              tuning.segment_bytes}),
      transfers_(identity_.rank, identity_.size, identity_.communicator),
      log_(tuning.log),
      observer_(tuning.observer),
      next_observer_(observer_),
      stop_request_(std::move(tuning.stop_request)),
      stall_monitor_(identity_, tuning.stall_seconds, std::move(tuning.log)),
      progress_(tuning.progress ? std::move(tuning.progress) : std::make_shared<ProgressThread>()) {
  if (tuning.max_message < kLeastMessage || tuning.max_message > kMostMessage)
    throw InvalidArgument("max_message is " + std::to_string(tuning.max_message) +
                          " bytes; use 4 KiB to 1 GiB, the same on all ranks");
  const auto numbers = identity_.job_ranks.size();
  if (numbers != 0 && numbers != static_cast<std::size_t>(identity_.size))
    throw InvalidArgument(std::to_string(numbers) + " ranks of the job for a communicator of " +
                          std::to_string(identity_.size));
  if (!wakeup_.valid()) throw Error(system_message("eventfd", errno));
}

Communicator::~Communicator() {
  abort("the communicator was destroyed");
  stop_progress_thread();
  if (family_) family_->leave(*this);
}

void Communicator::observe(std::shared_ptr<Observer> observer) {
  const std::lock_guard lock(mutex_);
  next_observer_ = std::move(observer);
  if (!driving_) return take_observer_locked();
  has_requests_ = true;
}

// Called by the driver or while nobody drives. A call is reported to one observer only.
void Communicator::take_observer_locked() noexcept {
  if (current_ == nullptr) observer_ = next_observer_;
}

void Communicator::set_model(schedule::CostModel model) {
  std::lock_guard lock(mutex_);
  plans_.set_model(std::move(model));
}

void Communicator::adopt_control(transport::Connection connection, Rank peer) {
  control_.adopt(std::move(connection), peer);
}

void Communicator::adopt_link(Lane lane, std::string_view transport,
                              transport::Connection connection, Rank peer, double timeout,
                              const Interrupt& interrupt) {
  Links& links = lane == Lane::kCollective ? links_ : transfer_links_;
  try {
    links.offer(transport, std::move(connection), peer);
    if (!links_.offered_all() || !transfer_links_.offered_all()) return;
    const WaitLimit wait_limit(Deadline::after(timeout), abort_or(interrupt));
    links_.complete(wait_limit);
    transfer_links_.complete(wait_limit);
  } catch (...) {
    const auto interruption = fail_with_root_cause(std::current_exception(), interrupt);
    if (interruption) std::rethrow_exception(interruption);
    std::lock_guard lock(mutex_);
    require_alive();
  }
}

void Communicator::join(std::shared_ptr<Family> family) {
  family_ = std::move(family);
  family_->join(*this);
}

// ---- Calls -------------------------------------------------------------------------------------

void Communicator::run(const Request& request, const Interrupt& interrupt) {
  std::unique_lock lock(mutex_);
  const std::shared_ptr<Work> work = enqueue(lock, request);
  drive_or_wait(lock, *work, Deadline::never(), interrupt);
  work->rethrow();
}

std::shared_ptr<Work> Communicator::begin(const Request& request,
                                          const std::function<void()>& slow) {
  std::unique_lock lock(mutex_);
  std::shared_ptr<Work> work = enqueue(lock, request);
  const bool alone = queue_.size() == 1 && submitted_.empty() && transfers_.idle();
  if (!driving_ && alone) drive(lock, work.get(), nullptr, std::max(spins_, 1U), slow);
  return work;
}

std::shared_ptr<Work> Communicator::submit(const Request& request) {
  std::unique_lock lock(mutex_);
  if (!started_) start_progress_thread_locked();  // which may throw
  std::shared_ptr<Work> work = enqueue(lock, request);
  start_progress_thread_locked();
  return work;
}

std::shared_ptr<Work> Communicator::send(std::byte* data, std::size_t size, Rank to,
                                         double timeout) {
  check_peer(to);
  Transfer transfer;
  if (to == identity_.rank) transfer.copy.assign(data, data + size);
  transfer.data = to == identity_.rank ? transfer.copy.data() : data;
  transfer.size = size;
  transfer.peer = to;
  transfer.timeout = timeout;
  transfer.deadline = Deadline::after(timeout);
  return enqueue_transfer(std::move(transfer), /*sends=*/true);
}

std::shared_ptr<Work> Communicator::receive(std::byte* data, std::size_t size, Rank from,
                                            double timeout) {
  if (from != Transfer::kAnyRank) check_peer(from);
  Transfer transfer;
  transfer.data = data;
  transfer.size = size;
  transfer.peer = from;
  transfer.timeout = timeout;
  transfer.deadline = Deadline::after(timeout);
  return enqueue_transfer(std::move(transfer), /*sends=*/false);
}

void Communicator::wait(Work& work, double timeout, const Interrupt& interrupt, bool background) {
  const Deadline deadline = Deadline::after(timeout);
  {
    std::unique_lock lock(mutex_);
    drive_or_wait(lock, work, deadline, interrupt, background);
  }
  if (!work.done())
    throw Timeout("rank " + std::to_string(identity_.rank) +
                      ": wait() timed out after its timeout=" + seconds_text(timeout) +
                      ", before its operation, which goes on; wait again or abort()",
                  kNoPeer);
  work.rethrow();
}

bool Communicator::should_stop(const Interrupt& interrupt) {
  return agreed(stop_since_, interrupt) || (identity_.size == 1 && stop_requested());
}

bool Communicator::should_resize(const Interrupt& interrupt) {
  return agreed(resize_since_, interrupt) || (identity_.size == 1 && resize_requested());
}

// The number of calls decides, and not what is over by now: another thread may have made a call
// meanwhile, which is over on some ranks only.
bool Communicator::agreed(const std::optional<std::uint64_t>& since, const Interrupt& interrupt) {
  std::unique_lock lock(mutex_);
  require_alive();
  if (identity_.size == 1) return false;
  const std::uint64_t calls = calls_over_ + queue_.size();
  if (!queue_.empty()) {
    const std::shared_ptr<Work> last = queue_.back()->work;
    drive_or_wait(lock, *last, Deadline::never(), interrupt);
    last->rethrow();
  }
  return since && *since <= calls;
}

bool Communicator::stop_requested() const noexcept {
  return own_stop_request_.made() || (stop_request_ && stop_request_->made());
}

void Communicator::check_peer(Rank peer) const {
  if (peer >= 0 && peer < identity_.size) return;
  throw InvalidArgument("rank " + std::to_string(peer) + " is no peer of rank " +
                        std::to_string(identity_.rank) + " in a communicator of " +
                        std::to_string(identity_.size));
}

void Communicator::require_alive() const {
  if (failure_) {
    unreported_ = false;
    std::rethrow_exception(failure_);
  }
  if (closed_) throw Aborted("this communicator is closed");
}

std::unique_ptr<Communicator::Pending> Communicator::take_spare() {
  if (spare_.empty()) return std::make_unique<Pending>();
  auto pending = std::move(spare_.back());
  spare_.pop_back();
  if (pending->work.use_count() > 1)
    pending->work = std::make_shared<Work>();
  else
    pending->work->reuse();
  return pending;
}

std::shared_ptr<Work> Communicator::enqueue(std::unique_lock<std::mutex>& lock,
                                            const Request& given) {
  Request request = given;
  request.rank = identity_.rank;
  request.size = identity_.size;
  check_arrays(request);
  require_alive();
  auto pending = take_spare();
  bind(*pending, request);
  if (pending->program != nullptr) {
    lock.unlock();  // so that the driver goes on meanwhile
    pending->program->prepare();
    lock.lock();
    require_alive();
  }
  pending->timeout = request.timeout;
  pending->submission = observer_ ? observer_->submitted(request) : Submission{};
  std::shared_ptr<Work> work = pending->work;
  queue_.push_back(std::move(pending));
  front_ = queue_.front().get();
  if (driving_) wake_driver();
  return work;
}

void Communicator::check_feedback(const Request& request) {
  if (!request.feedback) return;
  if (request.keys.empty())
    throw InvalidArgument("error feedback needs the key of each array, under which to keep it");
  const bool adds = request.op == ReduceOp::kSum || request.op == ReduceOp::kAvg;
  if (!reduces(request.collective) || !adds || request.dtype != DType::kFloat32)
    throw InvalidArgument("error feedback is for sums and averages of float32, not for " +
                          std::string(name_of(request.collective)) + " of " +
                          std::string(name_of(request.dtype)) + " with op '" +
                          std::string(name_of(request.op)) + "'");
}

// Called under the mutex, which guards the cache of plans.
void Communicator::bind(Pending& pending, const Request& request) {
  check_feedback(request);
  const bool feeds_back = request.feedback != nullptr;
  const Decision decision = decide(request, feeds_back);
  pending.feedback = request.feedback;
  pending.shape_digest = request.shape_check.digest;
  pending.shape.assign(request.shape_check.text);
  pending.checks_shape = request.shape_check.always;
  pending.program = nullptr;
  if (decision.method != Method::kPlan || votes(request, feeds_back)) {
    if (!pending.device) pending.device = std::make_unique<CpuDevice>();
    pending.program = pending.device.get();
    pending.program->bind(request, decision);
    plans_.find(pending.program->probe(), links_.link_of());
    return;
  }
  if (feeds_back) pending.transaction.open(*request.feedback, request.keys);
  bind_operation(pending, request);
}

void Communicator::bind_operation(Pending& pending, const Request& request) {
  const bool whole = pending.program == nullptr;
  pending.operation.bind(request, plans_.find(request, links_.link_of()),
                         whole ? pending.transaction : pending.program->transaction());
}

void Communicator::Pending::settle() noexcept {
  transaction.settle(false);
  if (program != nullptr) program->roll_back();
}

std::shared_ptr<Work> Communicator::enqueue_transfer(Transfer transfer, bool sends) {
  transfer.work = std::make_shared<Work>();
  std::shared_ptr<Work> work = transfer.work;
  {
    std::lock_guard lock(mutex_);
    require_alive();
    if (!started_) start_progress_thread_locked();
    submitted_.emplace_back(std::move(transfer), sends);
    has_requests_ = true;
    wake_driver();
    start_progress_thread_locked();
  }
  return work;
}

void Communicator::wake_driver() noexcept {
  [[maybe_unused]] const int failed = ::eventfd_write(wakeup_.get(), 1);
}

bool Communicator::closed() const {
  std::lock_guard lock(mutex_);
  return closed_ || failure_ != nullptr;
}

}  // namespace gradwire::exec
