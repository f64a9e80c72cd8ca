#include "gradwire/exec/engine.h"

#include <sched.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "gradwire/base/error.h"
#include "gradwire/codec/simd/simd.h"

namespace gradwire::exec {
namespace {

// Turns to spin where each rank has its own core, so that the awaited rank is running: they take a
// few microseconds.
constexpr unsigned kSpins = 100;

// Returns how often a rank spins: not at all where ranks share cores, since the rank that it waits
// for is not running and needs the core.
unsigned spins_of(const Identity& identity) {
  cpu_set_t cores;
  if (::sched_getaffinity(0, sizeof cores, &cores) != 0) return 0;
  return identity.ranks_on_host() <= CPU_COUNT(&cores) ? kSpins : 0;
}

}  // namespace

Engine::Engine(Identity its, const Tuning& tuning)
    : identity(std::move(its)),
      most_spins(spins_of(identity)),
      log(tuning.log),
      stop{tuning.stop_request, {}, {}},
      plans(
          {identity.rank, identity.size, identity.hosts, tuning.max_message, tuning.segment_bytes}),
      link_of(at(identity.size), -1),
      observer(tuning.observer),
      next_observer(observer),
      driver(*this, tuning),
      progress_(tuning.progress ? tuning.progress : std::make_shared<ProgressThread>()) {}

std::shared_ptr<Work> Engine::enqueue(Lock& lock, const Request& given) {
  Request request = given;
  request.rank = identity.rank;
  request.size = identity.size;
  request.codec = plans.codec_for(request);
  check_arrays(request);
  life.require_alive();
  auto pending = calls.take_spare();
  bind(*pending, request);
  if (pending->program != nullptr) {
    lock.unlock();  // so that the driver goes on meanwhile
    pending->program->prepare();
    lock.lock();
    life.require_alive();
  }
  pending->timeout = request.timeout;
  request.codec = given.codec;  // observers learn what was asked for
  pending->submission = observer ? observer->submitted(request) : Submission{};
  std::shared_ptr<Work> work = calls.push(std::move(pending));
  if (driver.taken(lock)) wakeup.ring();
  return work;
}

void Engine::bind(Pending& pending, const Request& request) {
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
    plans.find(pending.program->probe(), link_of);
    return;
  }
  if (feeds_back) pending.transaction.open(*request.feedback, request.keys);
  bind_operation(pending, request);
}

void Engine::bind_operation(Pending& pending, const Request& request) {
  const bool whole = pending.program == nullptr;
  pending.operation.bind(request, plans.find(request, link_of),
                         whole ? pending.transaction : pending.program->transaction());
}

std::shared_ptr<Work> Engine::enqueue_transfer(Transfer transfer, bool sends) {
  transfer.work = std::make_shared<Work>();
  std::shared_ptr<Work> work = transfer.work;
  const std::lock_guard lock(mutex);
  life.require_alive();
  start_progress_thread_once();  // which may throw
  calls.transfers.emplace_back(std::move(transfer), sends);
  has_requests = true;
  wakeup.ring();
  start_progress_thread();
  return work;
}

bool Engine::has_only_one_call(const Lock& lock) noexcept {
  const Driver* idle = driver.unless_taken(lock);
  return idle != nullptr && calls.size() == 1 && calls.transfers.empty() && idle->transfers.idle();
}

bool Engine::is_idle(const Lock& lock) noexcept {
  const Driver* idle = driver.unless_taken(lock);
  return idle != nullptr && calls.empty() && calls.transfers.empty() && idle->transfers.idle();
}

// A call is reported to one observer only.
void Engine::take_observer(const Driver& holder) noexcept {
  if (holder.current == nullptr) observer = next_observer;
}

void Engine::drive_or_wait(Lock& lock, Work& work, Deadline deadline, const Interrupt& interrupt,
                           bool background) {
  std::optional<Work::Waiter> waiter;
  std::optional<Deadline::Clock::time_point> since;
  if (observer && !background && !work.done()) since = Deadline::Clock::now();
  while (!work.done() && !deadline.passed()) {
    if (!driver.taken(lock) && deadline.is_never() && !background) {
      drive(lock, &work, interrupt);
      continue;
    }
    if (!waiter && !background) waiter.emplace(work);
    start_progress_thread();  // takes over from a driver whose own work is done
    lock.unlock();
    const double left = deadline.milliseconds_left(kInterruptMilliseconds) / 1e3;
    const bool over = work.wait_for(std::min(left, kInterruptSeconds));
    if (!over && interrupt) interrupt_or_abort(work, interrupt);
    lock.lock();
  }
  if (observer && since) observer->blocked(*since);
}

// Calls the interrupt. If that throws, aborts, and rethrows only when the driver no longer uses the
// caller's memory.
void Engine::interrupt_or_abort(const Work& work, const Interrupt& interrupt) {
  try {
    interrupt();
  } catch (...) {
    abort(name_of(identity.rank) + " was interrupted", /*alone=*/true);
    while (!work.wait_for(kInterruptSeconds)) continue;
    throw;
  }
}

void Engine::drive(Lock& lock, const Work* until, const Interrupt& interrupt, unsigned most_idle,
                   const std::function<void()>& slow) {
  const bool sleeps = most_idle == kNoIdleLimit;
  const auto turn = [&](Driver& holder) {
    const codec::FloatEnvironment environment;
    holder.begin(until);
    for (unsigned idle = 0; !holder.finished(until) && idle < most_idle;) {
      if (holder.step(interrupt)) {
        idle = 0;
      } else if (!holder.back_off(++idle)) {
        if (!sleeps) return;
        holder.sleep(interrupt);
      }
    }
  };
  if (const auto thrown = as_driver(lock, interrupt, turn, /*hands_over=*/sleeps, slow))
    std::rethrow_exception(thrown);
}

// Leaves what remains to the progress thread, and wakes it only if something remains, as waking
// costs time.
void Engine::give_back(Lock& lock, Holder holder, bool hands_over) {
  holder->driven_for = nullptr;
  handle_requests(lock, *holder);
  holder.give_back(lock);
  // begin() goes on to wait for its only call, and so to drive: another thread would only be woken
  // for nothing, and compete for the core.
  hands_over = hands_over || !has_only_one_call(lock);
  if (hands_over && service_ == Service::kServed && !is_idle(lock)) start_progress_thread();
  changed.notify_all();
}

}  // namespace gradwire::exec
