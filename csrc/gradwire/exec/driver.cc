#include "gradwire/exec/driver.h"

#include <algorithm>
#include <array>
#include <utility>

#include "gradwire/base/error.h"
#include "gradwire/base/spin.h"
#include "gradwire/exec/control/failure.h"
#include "gradwire/exec/engine.h"

namespace gradwire::exec {
namespace {

// Failures, deadlines and Ctrl-C are checked even while something always moves. A turn may take a
// millisecond, and reading the clock costs as much as a short turn, so not every turn reads it.
constexpr unsigned kTurnsBetweenChecks = 16;
constexpr double kCheckSeconds = 0.02;

transport::LinkOptions link_options(const Identity& identity, const Tuning& tuning,
                                    transport::Bells& bells) {
  transport::LinkOptions options;
  options.rank = identity.rank;
  options.size = identity.size;
  options.max_message = tuning.max_message;
  options.messages = std::max(16, 2 * identity.size);  // a plan stages a whole round
  options.bells = &bells;
  return options;
}

transport::LinkOptions transfer_options(const Identity& identity, const Tuning& tuning,
                                        transport::Bells& bells) {
  transport::LinkOptions options = link_options(identity, tuning, bells);
  options.max_message = std::min<std::size_t>(tuning.max_message, 64 * 1024);
  options.messages_per_peer = 4;  // a peer that does not receive holds up no other
  options.messages = std::max(4, options.messages_per_peer * (identity.size - 1));
  return options;
}

}  // namespace

Driver::Driver(Engine& engine, const Tuning& tuning)
    : control(engine.identity.rank, engine.identity.size, [this] { return liveness.position(); }),
      links(link_options(engine.identity, tuning, control.sockets()), tuning.contexts),
      transfer_links(transfer_options(engine.identity, tuning, control.sockets()), tuning.contexts),
      transfers(engine.identity.rank, engine.identity.size, engine.identity.communicator),
      liveness(engine, *this, tuning),
      engine_(engine) {}

bool Driver::step(const Interrupt& interrupt) {
  if (++turns_ % kTurnsBetweenChecks == 0 && checks_due_.passed()) run_checks(interrupt);
  if (!advance()) return false;
  backoff_.moved();
  if (liveness.waits()) liveness.stop_waiting();
  return true;
}

// Where nothing moves for long this rank waits, also if others keep the thread from sleep.
bool Driver::step_beside_others() {
  if (step(nullptr)) {
    idle_turns_ = 0;
    return true;
  }
  if (++idle_turns_ % (engine_.most_spins + kYields + 1) == 0) liveness.note_wait();
  return false;
}

bool Driver::finished(const Work* until) const {
  if (until != nullptr) return until->done();
  std::lock_guard lock(engine_.mutex);
  return engine_.calls.empty() && engine_.calls.transfers.empty() && transfers.idle();
}

bool Driver::advance() {
  if (engine_.has_requests.exchange(false)) process_requests();
  const bool moved = !transfers.idle() &&
                     transfers.advance(transfer_links, engine_.traffic, engine_.observer.get());
  return advance_collective() || moved;
}

// Takes what other threads have left under the mutex: an abort, a failure of the family, or new
// transfers.
void Driver::process_requests() {
  std::lock_guard lock(engine_.mutex);
  if (engine_.life.abort()) std::rethrow_exception(engine_.life.abort());
  if (engine_.life.family_failure()) throw RootCause{engine_.life.family_failure()};
  engine_.take_observer(*this);
  if (current == nullptr) liveness.stalls.start_idle();  // no transfer has waited yet
  for (auto& [transfer, sends] : engine_.calls.transfers) {
    if (sends)
      transfers.send(std::move(transfer));
    else
      transfers.receive(std::move(transfer));
  }
  engine_.calls.transfers.clear();
}

bool Driver::advance_collective() {
  if (current == nullptr && !start_next()) return false;
  if (current == nullptr) return true;  // it ended before it sent anything
  // Takes many steps for one round of checks, but few enough to notice an abort soon.
  constexpr int kBurst = 16;
  bool progressed = false;
  for (int i = 0; i < kBurst && execution.advance(links, engine_.traffic); ++i) progressed = true;
  if (!execution.done()) return progressed;
  finish_operation();
  return true;
}

// Starts the next call of the queue. Its timeout counts from here and not from its submission,
// since calls before it may take long.
bool Driver::start_next() {
  current = engine_.calls.front();
  if (current == nullptr) return false;
  liveness.start_deadline();
  if (engine_.observer) engine_.observer->started(current->submission);
  if (current->program == nullptr)
    start_operation();
  else if (!start_phase(/*finite=*/true))
    finish_current(/*unannounced=*/false);
  return true;
}

// Starts the program's next phase. Returns false when there is none.
bool Driver::start_phase(bool finite) {
  if (engine_.observer) engine_.observer->moves();
  const Request* phase = current->program->next({control.history().calls(), finite});
  if (engine_.observer) engine_.observer->computed(current->program->codec_time());
  engine_.traffic.add(current->program->codec_time());
  if (phase == nullptr) return false;
  {
    const std::lock_guard lock(engine_.mutex);  // of the plans, which threads that call use, too
    engine_.bind_operation(*current, *phase);
  }
  start_operation();
  return true;
}

void Driver::start_operation() {
  current->operation.begin();
  Execution::Call call = current->operation.call();
  call.rank = engine_.identity.rank;
  call.communicator = engine_.identity.communicator;
  call.operation = control.history().calls();
  if (engine_.stop.stop_requested()) call.requests |= kFrameStop;
  if (engine_.stop.resize.made()) call.requests |= kFrameResize;
  const CallShape shape = shape_of_call(*call.plan);
  call.fingerprint = control.history().fingerprint_of_next(*call.plan, shape);
  liveness.stalls.begin(call.operation, call.plan->fingerprint());
  call.observer = engine_.observer.get();
  if (engine_.observer) engine_.observer->phase(*call.plan, call.operation);
  execution.start(call);
  control.begin_call(current->operation.shared_plan(), shape);
}

// Returns the shapes that the ranks compare in this call: those of its arrays in the first call
// like it, or in every call where the caller asks for that.
CallShape Driver::shape_of_call(const Plan& plan) {
  if (current->shape_digest == 0) return {};
  const std::uint64_t digest =
      Fnv1a().number(plan.fingerprint()).number(current->shape_digest).digest();
  if (!shapes_.add(digest) && !current->checks_shape) return {};
  return {digest, current->shape};
}

void Driver::finish_operation() {
  if (engine_.observer) engine_.observer->phase_over();
  const bool finite = current->operation.end(execution.finite());
  engine_.traffic.add(execution.codec_time());
  if (current->operation.plan().confirms_all_ranks()) requests_agreed_ |= execution.requests();
  const bool unannounced = control.end_call();
  if (current->program != nullptr && start_phase(finite)) return;
  current->transaction.settle(finite);
  liveness.stalls.end();
  finish_current(unannounced);
}

void Driver::finish_current(bool unannounced) {
  current = nullptr;
  if (engine_.observer) engine_.observer->ended(nullptr);
  std::lock_guard lock(engine_.mutex);
  engine_.take_observer(*this);
  if (unannounced) engine_.announce_soon();
  engine_.calls.pop(requests_agreed_);
}

// Spins first: a peer that runs answers within microseconds, less than sleeping and waking takes.
// Then yields, which lets a peer that waits for this rank's core run.
bool Driver::back_off(unsigned idle) noexcept {
  const unsigned spins = backoff_.spins(engine_.most_spins);
  if (idle > spins + backoff_.yields(engine_.most_spins)) return false;
  if (idle <= spins)
    pause_spinning();
  else
    backoff_.yield();
  return true;
}

void Driver::run_checks(const Interrupt& interrupt) {
  checks_due_ = Deadline::after(kCheckSeconds);
  control.poll();
  end_links();
  // A rank that closes waits for this announcement, and transfers may go on without end.
  if (current == nullptr && control.has_unannounced_calls()) control.announce();
  liveness.check_deadlines();
  if (!interrupt || !interrupt_due_.passed()) return;
  interrupt_due_ = Deadline::after(kInterruptSeconds);
  call_interrupt(interrupt);
}

// Tells the links that have no sockets of their own whose control sockets have ended.
void Driver::end_links() noexcept {
  const int ended = control.sockets().ended();
  if (std::exchange(ended_links_, ended) == ended) return;
  for (Rank peer = 0; peer < engine_.identity.size; ++peer) {
    if (peer == engine_.identity.rank || control.sockets().connected(peer)) continue;
    links.end(peer);
    transfer_links.end(peer);
  }
}

void Driver::sleep(const Interrupt& interrupt) {
  if (!prepare_sleep(interrupt)) {
    std::array<pollfd, kMostDoorbells> fds;
    backoff_.sleeps();
    ::poll(fds.data(), put_doorbells(fds), longest_sleep());
    if (fds[0].revents != 0) engine_.wakeup.clear();
  }
  disarm();
}

bool Driver::prepare_sleep(const Interrupt& interrupt) {
  liveness.note_wait();
  run_checks(interrupt);
  links.arm();
  transfer_links.arm();
  const bool moved = advance();  // again: a message that came before arm() rings no doorbell
  if (moved) {
    backoff_.moved();
    liveness.stop_waiting();
  }
  return moved || engine_.has_requests;
}

void Driver::disarm() {
  links.disarm();
  transfer_links.disarm();
}

void Driver::call_interrupt(const Interrupt& interrupt) {
  try {
    interrupt();
  } catch (...) {
    throw Interruption{std::current_exception()};
  }
}

int Driver::longest_sleep() const {
  return liveness.next_due().milliseconds_left(kInterruptMilliseconds);
}

std::size_t Driver::put_doorbells(std::span<pollfd, kMostDoorbells> fds) const {
  std::size_t count = 0;
  const auto put = [&](int fd) { fds[count++] = {fd, POLLIN, 0}; };
  put(engine_.wakeup.fd());
  put(control.sockets().doorbell());
  for (int fd : links.doorbells()) put(fd);
  for (int fd : transfer_links.doorbells()) put(fd);
  return count;
}

void Driver::fail(const std::exception_ptr& error) noexcept {
  const transport::ControlFrame failure = failure_frame(error, engine_.identity.rank);
  control.sockets().broadcast(failure);
  liveness.stalls.status().set_failed(transport::text_of(failure));
  const bool called = std::exchange(current, nullptr) != nullptr;
  if (engine_.observer) {
    if (called) engine_.observer->ended(error);
    engine_.observer->failed(failure.kind, static_cast<Rank>(failure.value) - 1);
  }
  engine_.calls.fail(error);
  transfers.fail(error);
}

void Driver::close() noexcept {
  links = Links({});
  transfer_links = Links({});
  control.sockets().close_all();
}

}  // namespace gradwire::exec
