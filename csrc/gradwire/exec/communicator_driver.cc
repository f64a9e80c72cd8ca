// The driver of a communicator: the one thread that moves its work, and how it waits.
//
// A blocking call drives on its own thread, since waking another one takes longer than a small
// collective. While driving_ is set, the driver owns the execution, the transfers and the links: it
// takes the mutex where calls begin and end, and not while they move. That keeps a small call free
// of locks, and lets other threads submit while a long one runs.
//
// Waiting goes in three steps, each of which costs less latency but more processor time than the
// next: spin, yield, sleep in poll() on all doorbells. Before it sleeps it arms the doorbells and
// tries once more, or a message that came in between would ring none.
#include "gradwire/exec/communicator.h"

#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <utility>

#include "gradwire/base/error.h"
#include "gradwire/base/spin.h"
#include "gradwire/codec/simd/simd.h"
#include "gradwire/exec/control/failure.h"

namespace gradwire::exec {
namespace {

// Failures, deadlines and Ctrl-C are checked even while something always moves. A turn may take a
// millisecond, and reading the clock costs as much as a short turn, so not every turn reads it.
constexpr unsigned kTurnsBetweenChecks = 16;
constexpr double kCheckSeconds = 0.02;
constexpr int kInterruptMilliseconds = 100;
constexpr double kInterruptSeconds = kInterruptMilliseconds / 1e3;
// A rank that has waited for so long announces whom it waits for.
constexpr double kAnnounceSeconds = 0.1;
// How long a rank waits for answers to a query on behalf of another.
constexpr double kRelaySeconds = 0.2;

}  // namespace

// Leaves what remains to the progress thread, and wakes it only if something remains, as waking
// costs time.
void Communicator::stop_driving_locked(bool hands_over) {
  driving_ = false;
  if (hands_over && started_ && !is_idle()) start_progress_thread_locked();
  changed_.notify_all();
}

// Returns when `work` is over: drives while no other thread does, and otherwise sleeps until it may
// drive. In the background it never drives, and does not count as a waiter.
void Communicator::drive_or_wait(std::unique_lock<std::mutex>& lock, Work& work, Deadline deadline,
                                 const Interrupt& interrupt, bool background) {
  std::optional<Work::Waiter> waiter;
  std::optional<Deadline::Clock::time_point> since;
  if (observer_ && !background && !work.done()) since = Deadline::Clock::now();
  while (!work.done() && !deadline.passed()) {
    if (!driving_ && deadline.is_never() && !background) {
      drive(lock, &work, interrupt);
      continue;
    }
    if (!waiter && !background) waiter.emplace(work);
    start_progress_thread_locked();  // takes over from a driver whose own work is done
    lock.unlock();
    const double left = deadline.milliseconds_left(kInterruptMilliseconds) / 1e3;
    const bool over = work.wait_for(std::min(left, kInterruptSeconds));
    if (!over && interrupt) interrupt_or_abort(work, interrupt);
    lock.lock();
  }
  if (observer_ && since) observer_->blocked(*since);
}

// Calls the interrupt. If that throws, aborts, and rethrows only when the driver no longer uses the
// caller's memory.
void Communicator::interrupt_or_abort(const Work& work, const Interrupt& interrupt) {
  try {
    interrupt();
  } catch (...) {
    abort("rank " + std::to_string(identity_.rank) + " was interrupted");
    while (!work.wait_for(kInterruptSeconds)) continue;
    throw;
  }
}

// Drives until `until` is over or, if that is null, until nothing is left to do; or until nothing
// has moved `most_idle` times in a row. Must be called with the mutex held, and releases it
// meanwhile.
void Communicator::drive(std::unique_lock<std::mutex>& lock, const Work* until,
                         const Interrupt& interrupt, unsigned most_idle,
                         const std::function<void()>& slow) {
  begin_driving_locked(until);
  lock.unlock();
  std::exception_ptr interruption;
  try {
    const codec::FloatEnvironment environment;
    for (unsigned idle = 0; !finished(until) && idle < most_idle;) {
      if (step(interrupt))
        idle = 0;
      else
        back_off(++idle, interrupt);
    }
  } catch (...) {
    if (slow) slow();
    interruption = fail_with_root_cause(std::current_exception(), interrupt);
  }
  lock.lock();
  end_driving(lock, /*hands_over=*/most_idle == kNoIdleLimit);
  if (interruption) std::rethrow_exception(interruption);
}

// A driver first moves what has arrived, and then looks for failures, which may have come after it.
void Communicator::begin_driving_locked(const Work* until) {
  driving_ = true;
  driven_for_ = until;
  turns_ = 0;
}

void Communicator::end_driving(std::unique_lock<std::mutex>& lock, bool hands_over) {
  driven_for_ = nullptr;
  settle_requests(lock);
  // begin() goes on to wait for its only call, and so to drive: another thread would only be woken
  // for nothing, and compete for the core.
  const bool only_call = queue_.size() == 1 && submitted_.empty() && transfers_.idle();
  stop_driving_locked(hands_over || !only_call);
}

// Moves what can move, and returns whether something did.
bool Communicator::step(const Interrupt& interrupt) {
  if (++turns_ % kTurnsBetweenChecks == 0 && checks_due_.passed()) run_checks(interrupt);
  if (!advance()) return false;
  if (waits_since_) stop_waiting();
  return true;
}

// Returns whether the driver is done. Only the driver may call it.
bool Communicator::finished(const Work* until) const {
  if (until != nullptr) return until->done();
  std::lock_guard lock(mutex_);
  return queue_.empty() && submitted_.empty() && transfers_.idle();
}

bool Communicator::advance() {
  if (has_requests_.exchange(false)) process_requests();
  const bool moved =
      !transfers_.idle() && transfers_.advance(transfer_links_, traffic_, observer_.get());
  return advance_collective() || moved;
}

// Takes what other threads have left under the mutex: an abort, a failure of the family, or new
// transfers.
void Communicator::process_requests() {
  std::lock_guard lock(mutex_);
  if (abort_requested_) throw aborted();
  if (family_failure_) throw RootCause{family_failure_};
  take_observer_locked();
  if (current_ == nullptr) stall_monitor_.start_idle();  // no transfer has waited yet
  for (auto& [transfer, sends] : submitted_) {
    if (sends)
      transfers_.send(std::move(transfer));
    else
      transfers_.receive(std::move(transfer));
  }
  submitted_.clear();
}

bool Communicator::advance_collective() {
  if (current_ == nullptr && !start_next()) return false;
  if (current_ == nullptr) return true;  // it ended before it sent anything
  // Takes many steps for one round of checks, but few enough to notice an abort soon.
  constexpr int kBurst = 16;
  bool progressed = false;
  for (int i = 0; i < kBurst && execution_.advance(links_, traffic_); ++i) progressed = true;
  if (!execution_.done()) return progressed;
  finish_operation();
  return true;
}

// Starts the next call of the queue. Its timeout counts from here and not from its submission,
// since calls before it may take long.
bool Communicator::start_next() {
  current_ = front_;
  if (current_ == nullptr) return false;
  start_deadline();
  if (observer_) observer_->started(current_->submission);
  if (current_->program == nullptr)
    start_operation();
  else if (!start_phase(/*finite=*/true))
    finish_current(/*untold=*/false);
  return true;
}

// Starts the program's next phase. Returns false when there is none.
bool Communicator::start_phase(bool finite) {
  if (observer_) observer_->moves();
  const Request* phase = current_->program->next({control_.history().calls(), finite});
  if (observer_) observer_->computed(current_->program->codec_time());
  traffic_.add(current_->program->codec_time());
  if (phase == nullptr) return false;
  {
    std::lock_guard lock(mutex_);  // the cache of plans is shared with threads that submit calls
    bind_operation(*current_, *phase);
  }
  start_operation();
  return true;
}

void Communicator::start_operation() {
  current_->operation.begin();
  Execution::Call call = current_->operation.call();
  call.rank = identity_.rank;
  call.communicator = identity_.communicator;
  call.operation = control_.history().calls();
  if (stop_requested()) call.requests |= kFrameStop;
  if (resize_requested()) call.requests |= kFrameResize;
  const CallShape shape = shape_of_call(*call.plan);
  call.fingerprint = control_.history().fingerprint_of_next(*call.plan, shape);
  stall_monitor_.begin(call.operation, call.plan->fingerprint());
  call.observer = observer_.get();
  if (observer_) observer_->phase(*call.plan, call.operation);
  execution_.start(call);
  control_.begin_call(current_->operation.shared_plan(), shape);
}

// Returns the shapes that the ranks compare in this call: those of its arrays in the first call
// like it, or in every call where the caller asks for that.
CallShape Communicator::shape_of_call(const Plan& plan) {
  if (current_->shape_digest == 0) return {};
  const std::uint64_t digest =
      Fnv1a().number(plan.fingerprint()).number(current_->shape_digest).digest();
  if (!shapes_.add(digest) && !current_->checks_shape) return {};
  return {digest, current_->shape};
}

void Communicator::finish_operation() {
  if (observer_) observer_->phase_over();
  const bool finite = current_->operation.end(execution_.finite());
  traffic_.add(execution_.codec_time());
  if (current_->operation.plan().confirms_all_ranks()) requests_agreed_ |= execution_.requests();
  const bool unannounced = control_.end_call();
  if (current_->program != nullptr && start_phase(finite)) return;
  current_->transaction.settle(finite);
  stall_monitor_.end();
  finish_current(unannounced);
}

void Communicator::finish_current(bool unannounced) {
  current_ = nullptr;
  if (observer_) observer_->ended(nullptr);
  std::lock_guard lock(mutex_);
  take_observer_locked();
  if (unannounced) announce_soon_locked();
  auto done = std::move(queue_.front());
  queue_.erase(queue_.begin());
  front_ = queue_.empty() ? nullptr : queue_.front().get();
  ++calls_over_;
  if ((requests_agreed_ & kFrameStop) != 0 && !stop_since_) stop_since_ = calls_over_;
  if ((requests_agreed_ & kFrameResize) != 0 && !resize_since_) resize_since_ = calls_over_;
  done->feedback.reset();
  done->work->finish(nullptr);
  spare_.push_back(std::move(done));
}

// Spins first: a peer that runs answers within microseconds, less than sleeping and waking takes.
// Then yields, which lets a peer that waits for this rank's core run; then sleeps.
void Communicator::back_off(unsigned idle, const Interrupt& interrupt) {
  if (idle <= spins_) return pause_spinning();
  if (idle <= spins_ + kYields) return static_cast<void>(::sched_yield());
  sleep(interrupt);
}

void Communicator::run_checks(const Interrupt& interrupt) {
  checks_due_ = Deadline::after(kCheckSeconds);
  control_.poll();
  end_links();
  // A rank that closes waits for this announcement, and transfers may go on without end.
  if (current_ == nullptr && control_.has_unannounced_calls()) control_.announce();
  check_deadlines();
  if (!interrupt || !interrupt_due_.passed()) return;
  interrupt_due_ = Deadline::after(kInterruptSeconds);
  call_interrupt(interrupt);
}

// Tells the links that have no sockets of their own whose control sockets have ended.
void Communicator::end_links() noexcept {
  if (std::exchange(ended_links_, control_.ended()) == control_.ended()) return;
  for (Rank peer = 0; peer < identity_.size; ++peer) {
    if (peer == identity_.rank || !control_.has_ended(peer)) continue;
    links_.end(peer);
    transfer_links_.end(peer);
  }
}

void Communicator::sleep(const Interrupt& interrupt) {
  if (!prepare_sleep(interrupt)) poll_doorbells();
  disarm();
}

// Does what a rank does that waits: it tells others for whom, and logs it, after a while.
void Communicator::note_wait() {
  if (!waits_since_) start_waiting();
  check_stall();
  if (family_ && announced_ && serve_at_.passed()) serve_family();
  if (stall_monitor_.due())
    if (const auto wait = waiting()) stall_monitor_.report(*wait, control_);
}

// Arms the doorbells. Returns whether something has moved meanwhile.
bool Communicator::prepare_sleep(const Interrupt& interrupt) {
  note_wait();
  run_checks(interrupt);
  links_.arm();
  transfer_links_.arm();
  const bool moved = advance();  // again: a message that came before arm() rings no doorbell
  if (moved) stop_waiting();
  return moved || has_requests_;
}

void Communicator::disarm() {
  links_.disarm();
  transfer_links_.disarm();
}

// Wraps what the caller's interrupt throws: no other rank may be the root cause of it.
void Communicator::call_interrupt(const Interrupt& interrupt) {
  try {
    interrupt();
  } catch (...) {
    throw Interruption{std::current_exception()};
  }
}

// Returns the milliseconds until something is due even if no doorbell rings.
int Communicator::longest_sleep() const {
  Deadline next = announced_ ? Deadline::never() : announce_at_;
  if (current_ != nullptr) {
    next = std::min(next, query_due_);
    if (!current_->deadline.passed()) next = std::min(next, current_->deadline);
  }
  return next.milliseconds_left(kInterruptMilliseconds);
}

// Puts this communicator's doorbells there; returns how many there are.
std::size_t Communicator::put_doorbells(std::span<pollfd, kMostDoorbells> fds) const {
  std::size_t count = 0;
  const auto put = [&](int fd) { fds[count++] = {fd, POLLIN, 0}; };
  put(wakeup_.get());
  put(control_.doorbell());
  for (int fd : links_.doorbells()) put(fd);
  for (int fd : transfer_links_.doorbells()) put(fd);
  return count;
}

void Communicator::poll_doorbells() {
  std::array<pollfd, kMostDoorbells> fds;
  ::poll(fds.data(), put_doorbells(fds), longest_sleep());
  if (fds[0].revents != 0) empty_wakeup();
}

void Communicator::empty_wakeup() noexcept {
  eventfd_t ignored;
  ::eventfd_read(wakeup_.get(), &ignored);
}

void Communicator::start_waiting() {
  waits_since_ = Deadline::Clock::now();
  stall_monitor_.start_idle();
  const double longest = current_ == nullptr ? kAnnounceSeconds : current_->timeout / 2;
  announce_at_ = Deadline::after(std::min(longest, kAnnounceSeconds));
}

// Ends a wait. Other ranks' logs name whom this rank waits for, so they are told that this is over.
void Communicator::stop_waiting() {
  waits_since_.reset();
  stall_monitor_.set_moving(/*outside=*/current_ == nullptr);
  if (!std::exchange(announced_, false)) return;
  control_.announce();
  if (!family_) return;
  family_->set_wait(*this, kNoPeer);
  family_->serve_others(*this);
}

// Has this rank answer in the family's other members, while it waits in this one: for whom, and
// whom that waits for, which it finds out when it is asked.
void Communicator::serve_family() {
  serve_at_ = Deadline::after(kInterruptSeconds);
  if (!control_.awaits_replies(kRelaySeconds)) {
    const Rank peer = awaited();
    const ChainEnd end = peer == kNoPeer ? ChainEnd{} : control_.end_of_chain(peer);
    family_->set_wait(*this, end.peer == kNoPeer ? end.job_peer : identity_.job_rank(end.peer));
  }
  const bool asked = family_->serve_others(*this);
  const bool queries = positions_queried_ || transfer_query_;  // its own answers come first
  if (asked && !queries && !control_.awaits_replies(kRelaySeconds)) control_.query_positions();
}

bool Communicator::serve() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  return lock && serve_locked();
}

bool Communicator::serve_locked() {
  if (driving_ || failure_ || closed_) return false;
  const bool asked = control_.serve();
  const Rank elsewhere = position().elsewhere;
  if (elsewhere != std::exchange(announced_elsewhere_, elsewhere)) control_.announce();
  return asked;
}

// Returns the rank for which a thread of the program is blocked in this communicator. One that
// computes while its calls go on in the background waits for nobody.
Rank Communicator::awaited() const {
  if (!waits_since_) return kNoPeer;
  if (const auto transfer = awaited_transfer()) return transfer->peer;
  if (current_ == nullptr || !collective_is_awaited()) return kNoPeer;
  const Rank peer = execution_.waiting_for();
  return peer != kNoPeer ? peer : links_.full_peer();
}

// Returns whether a thread is blocked until a collective is over: it waits for those before it too.
bool Communicator::collective_is_awaited() const {
  const std::lock_guard lock(mutex_);
  return finishes_ || std::ranges::any_of(queue_, [this](const auto& each) {
           return each->work.get() == driven_for_ || each->work->awaited();
         });
}

// Returns the transfer for which a thread is blocked.
std::optional<Wait> Communicator::awaited_transfer() const {
  if (transfers_.idle()) return std::nullopt;
  auto wait = transfers_.waiting([this](const Transfer& each, bool sends) {
    return finishes_ || each.work.get() == driven_for_ || each.work->awaited() ||
           (!sends && senders_.contains(each.peer));
  });
  if (wait && wait->peer == Transfer::kAnyRank) wait->peer = senders_.certain();
  return wait;
}

Position Communicator::position() const {
  Position at;
  at.in_call = current_ != nullptr;
  if (waits_since_)
    at.seconds = std::chrono::duration<double>(Deadline::Clock::now() - *waits_since_).count();
  if (!at.in_call) {
    if (const auto transfer = awaited_transfer(); transfer && waits_since_) {
      at.waits_for = transfer->peer;
      return at;
    }
    if (family_) at.elsewhere = family_->waits_elsewhere(*this);
    if (at.elsewhere != kNoPeer) at.waits_for = identity_.member(at.elsewhere);
    return at;
  }
  if (!waits_since_) return at;
  at.waits_for = execution_.waiting_for();
  if (const Frame* frame = execution_.waiting_frame()) {
    at.round = frame->round;
    at.segment = frame->segment;
  }
  return at;
}

// Returns the position as the stall monitor needs it: the call's or, outside of calls, a
// transfer's.
std::optional<Wait> Communicator::waiting() {
  if (current_ == nullptr) return awaited_transfer();
  const Plan& plan = current_->operation.plan();
  const Position at = position();
  Wait wait;
  wait.number = control_.history().calls() - 1;
  wait.reads = execution_.waits_for_reader();
  wait.peer = at.waits_for != kNoPeer ? at.waits_for : links_.full_peer();
  wait.round = at.round;
  wait.segment = at.segment;
  wait.fingerprint = plan.fingerprint();
  wait.spec = plan.text();
  return wait;
}

// Announces, once per wait, whom this rank waits for.
void Communicator::check_stall() {
  if (announced_ || !announce_at_.passed()) return;
  announced_ = true;
  control_.announce();
}

}  // namespace gradwire::exec
