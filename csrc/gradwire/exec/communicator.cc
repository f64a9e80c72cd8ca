#include "gradwire/exec/communicator.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <utility>

#include "gradwire/base/error.h"
#include "gradwire/exec/failure.h"

namespace gradwire::exec {
namespace {

// How long one that closes waits for others that do.
constexpr double kLeaveSeconds = 0.25;
// How long a peer that does not read may hold up the last words of a failed communicator.
constexpr double kLastWordSeconds = 1;
constexpr int kHearMilliseconds = 50;
constexpr std::size_t kLeastMessage = 4096, kMostMessage = std::size_t{1} << 30;

transport::Options link_options(const Identity& identity, const Tuning& tuning) {
  transport::Options options;
  options.rank = identity.rank;
  options.size = identity.size;
  options.max_message = tuning.max_message;
  options.messages = std::max(16, 2 * identity.size);  // a plan stages a whole round
  options.link = tuning.link;
  return options;
}

transport::Options transfer_options(const Identity& identity, const Tuning& tuning) {
  transport::Options options = link_options(identity, tuning);
  options.max_message = std::min<std::size_t>(tuning.max_message, 64 * 1024);
  options.messages_per_peer = 4;  // who does not receive holds up nobody else
  options.messages = std::max(4, options.messages_per_peer * (identity.size - 1));
  return options;
}

}  // namespace

Communicator::Communicator(Identity identity, Tuning tuning)
    : identity_(std::move(identity)),
      links_(link_options(identity_, tuning)),
      transfer_links_(transfer_options(identity_, tuning)),
      control_(identity_.rank, identity_.size, [this] { return position(); }),
      wakeup_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      plans_({identity_.rank, identity_.size, identity_.hosts, tuning.max_message,
              tuning.segment_bytes}),
      transfers_(identity_.rank, identity_.size, identity_.communicator),
      watch_(identity_, tuning.stall_seconds, tuning.log) {
  if (tuning.max_message < kLeastMessage || tuning.max_message > kMostMessage)
    throw InvalidArgument("max_message is " + std::to_string(tuning.max_message) +
                          " bytes; use 4 KiB to 1 GiB, the same on all ranks");
  if (!wakeup_.valid()) throw Error(system_message("eventfd", errno));
}

Communicator::~Communicator() {
  abort("the communicator was destroyed");
  stop_progress_thread();
}

void Communicator::adopt_control(UniqueFd socket, Rank peer) {
  control_.adopt(std::move(socket), peer);
}

void Communicator::adopt_link(Lane lane, std::string_view transport, UniqueFd socket, Rank peer,
                              double timeout, const Interrupt& interrupt) {
  Links& links = lane == Lane::kCollective ? links_ : transfer_links_;
  try {
    links.offer(transport, std::move(socket), peer);
    if (!links_.offered_all() || !transfer_links_.offered_all()) return;
    const Patience patience(Deadline::after(timeout), wish_to_end(interrupt));
    links_.complete(patience);
    transfer_links_.complete(patience);
  } catch (...) {
    const auto interruption = fail_for(std::current_exception(), interrupt);
    if (interruption) std::rethrow_exception(interruption);
    std::lock_guard lock(mutex_);
    require_alive();
  }
}

// ---- Calls -------------------------------------------------------------------------------------

void Communicator::run(const Request& request, const Interrupt& interrupt) {
  const std::shared_ptr<Work> work = enqueue(request);
  drive_or_wait(*work, Deadline::never(), interrupt);
  work->rethrow();
}

std::shared_ptr<Work> Communicator::submit(const Request& request) {
  std::shared_ptr<Work> work = enqueue(request);
  start_progress_thread();
  return work;
}

std::shared_ptr<Work> Communicator::send(std::byte* data, std::size_t size, Rank to,
                                         double timeout) {
  check_peer(to);
  Transfer transfer;
  transfer.data = data;
  transfer.size = size;
  transfer.peer = to;
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
  transfer.deadline = Deadline::after(timeout);
  return enqueue_transfer(std::move(transfer), /*sends=*/false);
}

void Communicator::wait(Work& work, double timeout, const Interrupt& interrupt) {
  const Deadline deadline = Deadline::after(timeout);
  drive_or_wait(work, deadline, interrupt);
  if (!work.done())
    throw Timeout("rank " + std::to_string(identity_.rank) +
                      ": wait() ended before its operation, which goes on; wait again or abort()",
                  kNoPeer);
  work.rethrow();
}

void Communicator::check_peer(Rank peer) const {
  if (peer >= 0 && peer < identity_.size && peer != identity_.rank) return;
  throw InvalidArgument("rank " + std::to_string(peer) + " is no peer of rank " +
                        std::to_string(identity_.rank) + " in a communicator of " +
                        std::to_string(identity_.size));
}

void Communicator::require_alive() const {
  if (failure_) std::rethrow_exception(failure_);
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

std::shared_ptr<Work> Communicator::enqueue(const Request& request) {
  Operation::check(request, identity_.rank, identity_.size);
  std::unique_lock lock(mutex_);
  require_alive();
  auto pending = take_spare();
  bind(*pending, request);
  if (pending->compound != nullptr) {
    lock.unlock();  // for the driver, who is at work
    pending->compound->prepare();
    lock.lock();
    require_alive();
  }
  pending->timeout = request.timeout;
  std::shared_ptr<Work> work = pending->work;
  queue_.push_back(std::move(pending));
  if (driving_) ring();
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

// Under the mutex, as all that makes plans.
void Communicator::bind(Pending& pending, const Request& request) {
  check_feedback(request);
  const Way way = way_of(request, identity_.size);
  pending.feedback = request.feedback;
  pending.compound = way == Way::kAtOnce ? nullptr : &pending.compound_for(way);
  if (pending.compound != nullptr) {
    pending.compound->bind(request, identity_.rank, identity_.size);
    plans_.find(pending.compound->probe(), links_.link_of());
    return;
  }
  if (request.feedback) pending.transaction.open(*request.feedback, request.keys);
  bind_operation(pending, request);
}

void Communicator::bind_operation(Pending& pending, const Request& request) {
  const bool whole = pending.compound == nullptr;
  pending.operation.bind(request, plans_.find(request, links_.link_of()), identity_.rank,
                         identity_.size,
                         whole ? pending.transaction : pending.compound->transaction());
}

Compound& Communicator::Pending::compound_for(Way way) {
  auto& made = compounds.at(static_cast<std::size_t>(way));
  if (!made) made = make_compound(way);
  return *made;
}

void Communicator::Pending::settle() noexcept {
  transaction.settle(false);
  if (compound != nullptr) compound->roll_back();
}

std::shared_ptr<Work> Communicator::enqueue_transfer(Transfer transfer, bool sends) {
  transfer.work = std::make_shared<Work>();
  std::shared_ptr<Work> work = transfer.work;
  {
    std::lock_guard lock(mutex_);
    require_alive();
    submitted_.emplace_back(std::move(transfer), sends);
    attention_ = true;
    ring();
  }
  start_progress_thread();
  return work;
}

void Communicator::ring() noexcept {
  [[maybe_unused]] const int failed = ::eventfd_write(wakeup_.get(), 1);
}

bool Communicator::closed() const {
  std::lock_guard lock(mutex_);
  return closed_ || failure_ != nullptr;
}

// ---- Ending ------------------------------------------------------------------------------------

void Communicator::abort(const std::string& reason) noexcept {
  {
    std::lock_guard lock(mutex_);
    if (ended_ || failure_ || abort_requested_) return;
    abort_requested_ = true;
    abort_reason_ = reason;
    attention_ = true;
    if (!driving_) fail_locked(std::make_exception_ptr(Aborted(reason, identity_.rank)));
    ring();
  }
  changed_.notify_all();
}

void Communicator::close(double timeout, const Interrupt& interrupt) {
  const Deadline deadline = Deadline::after(timeout);
  std::unique_lock lock(mutex_);
  if (std::exchange(ending_, true))  // by another thread
    return changed_.wait(lock, [this] { return ended_; });
  const bool was_alive = !failure_;
  std::exception_ptr interruption = finish_work(lock, deadline, interrupt);
  const bool in_peace = !interruption && !failure_ && is_idle();
  if (in_peace)
    interruption = take_leave(lock, std::min(deadline, Deadline::after(kLeaveSeconds)), interrupt);
  lock.unlock();
  if (!in_peace)
    abort("rank " + std::to_string(identity_.rank) +
          (interruption ? " was interrupted" : " closed its communicator with work in flight"));
  let_go();
  if (interruption) std::rethrow_exception(interruption);
  if (was_alive && failure_ && !abort_requested_) std::rethrow_exception(failure_);
}

void Communicator::let_go() {
  stop_progress_thread();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !driving_; });  // a caller's thread, about to see the abort
  closed_ = ended_ = true;
  links_ = Links({});
  transfer_links_ = Links({});
  control_.let_go();
  wakeup_.reset();
  watch_.let_go();
  changed_.notify_all();
}

bool Communicator::is_idle() const {
  return !driving_ && queue_.empty() && submitted_.empty() && transfers_.idle();
}

// What the interrupt threw, which ends the waiting.
std::exception_ptr Communicator::finish_work(std::unique_lock<std::mutex>& lock,
                                             const Deadline& deadline, const Interrupt& interrupt) {
  const auto over = [this] { return failure_ || is_idle(); };
  if (!over()) start_progress_thread_locked();
  while (!over() && !deadline.passed()) {
    changed_.wait_for(lock, std::chrono::milliseconds(deadline.milliseconds_left(100)));
    if (!interrupt) continue;
    lock.unlock();
    try {
      interrupt();
    } catch (...) {
      lock.lock();
      return std::current_exception();
    }
    lock.lock();
  }
  return nullptr;
}

// As a driver, without the mutex; calls made meanwhile see a closed communicator. Returns what the
// interrupt threw.
std::exception_ptr Communicator::take_leave(std::unique_lock<std::mutex>& lock,
                                            const Deadline& deadline, const Interrupt& interrupt) {
  driving_ = closed_ = true;
  lock.unlock();
  std::exception_ptr interruption;
  try {
    control_.take_leave({deadline, wish_to_end(interrupt)});
  } catch (const Interruption& stopped) {  // all is said: it only waited for the others
    interruption = stopped.cause;
  } catch (...) {
    interruption = fail_for(std::current_exception(), interrupt);
  }
  lock.lock();
  driving_ = false;
  changed_.notify_all();
  return interruption;
}

void Communicator::hear(double seconds) {
  const Deadline deadline = Deadline::after(seconds);
  std::unique_lock lock(mutex_);
  for (;;) {
    require_alive();
    if (!driving_) listen(lock);  // else the driver hears it
    require_alive();
    if (deadline.passed()) return;
    changed_.wait_for(lock,
                      std::chrono::milliseconds(deadline.milliseconds_left(kHearMilliseconds)));
  }
}

// As a driver, without the mutex.
void Communicator::listen(std::unique_lock<std::mutex>& lock) {
  driving_ = true;
  lock.unlock();
  try {
    control_.listen();
  } catch (...) {
    fail_for(std::current_exception(), nullptr);
  }
  lock.lock();
  driving_ = false;
  changed_.notify_all();
}

std::vector<std::pair<Rank, transport::Released>> Communicator::release_controls() {
  std::unique_lock lock(mutex_);
  if (!closed_ && !failure_ && !abort_requested_)
    throw InvalidArgument("this communicator has not failed: to leave it all the same, abort() it");
  changed_.wait(lock, [this] { return !driving_; });
  if (std::exchange(ending_, true)) throw Aborted("this communicator is closed");
  driving_ = closed_ = true;
  lock.unlock();
  std::vector<std::pair<Rank, transport::Released>> released;
  for (Rank peer = 0; peer < identity_.size; ++peer)
    if (auto each = control_.release(peer, kLastWordSeconds))
      released.emplace_back(peer, std::move(*each));
  lock.lock();
  driving_ = false;
  lock.unlock();
  let_go();
  return released;
}

void Communicator::let_go_in_child() noexcept {
  links_ = Links({});
  transfer_links_ = Links({});
  control_.let_go();
  watch_.let_go_in_child();
  wakeup_.reset();
}

void Communicator::stop_progress_thread() {
  {
    std::lock_guard lock(mutex_);  // not between the thread's last look and its sleep
    stopped_ = true;
    progress_.request_stop();
    ring();
  }
  changed_.notify_all();
  if (progress_.joinable()) progress_.join();
}

// Ends a wait: throws where this communicator was aborted, or its caller interrupted.
Communicator::Interrupt Communicator::wish_to_end(const Interrupt& interrupt) {
  return [this, &interrupt] {
    {
      std::lock_guard lock(mutex_);
      if (abort_requested_) throw Aborted(abort_reason_, identity_.rank);
    }
    if (interrupt) call_interrupt(interrupt);
  };
}

// Of the driver: fails for the root cause of `error`. Returns what the interrupt threw, if that
// is it.
std::exception_ptr Communicator::fail_for(const std::exception_ptr& error,
                                          const Interrupt& interrupt) {
  try {
    std::rethrow_exception(control_.root_cause(error, wish_to_end(interrupt)));
  } catch (const Interruption& stopped) {
    fail(std::make_exception_ptr(
        Aborted("rank " + std::to_string(identity_.rank) + " was interrupted", identity_.rank)));
    return stopped.cause;
  } catch (...) {
    fail(std::current_exception());
  }
  return nullptr;
}

void Communicator::fail(const std::exception_ptr& error) noexcept {
  std::lock_guard lock(mutex_);
  fail_locked(error);
}

// Nobody drives, or the driver itself calls: its own state may be touched.
void Communicator::fail_locked(const std::exception_ptr& error) noexcept {
  if (failure_) return;
  failure_ = error;
  control_.say_failure(error);
  watch_.fails(transport::text_of(failure_frame(error, identity_.rank)));
  current_ = nullptr;
  for (auto& each : queue_) {
    each->settle();
    each->work->finish(error);
  }
  queue_.clear();
  transfers_.fail(error);
  for (auto& [transfer, sends] : submitted_) transfer.work->finish(error);
  submitted_.clear();
}

}  // namespace gradwire::exec
