// Set-up of a communicator, and its calls; communicator_ending.cc ends it.
#include "gradwire/exec/communicator.h"

#include <algorithm>
#include <utility>

#include "gradwire/base/error.h"
#include "gradwire/codec/lossless.h"
#include "gradwire/exec/engine.h"

namespace gradwire::exec {
namespace {

constexpr std::size_t kLeastMessage = 4096, kMostMessage = std::size_t{1} << 30;

void check(const Identity& identity, const Tuning& tuning) {
  if (tuning.max_message < kLeastMessage || tuning.max_message > kMostMessage)
    throw InvalidArgument("max_message is " + std::to_string(tuning.max_message) +
                          " bytes; use 4 KiB to 1 GiB, the same on all ranks");
  const auto numbers = identity.job_ranks.size();
  if (numbers != 0 && numbers != at(identity.size))
    throw InvalidArgument(std::to_string(numbers) + " ranks of the job for a communicator of " +
                          std::to_string(identity.size));
}

void check_peer(const Identity& identity, Rank peer) {
  if (peer >= 0 && peer < identity.size) return;
  throw InvalidArgument(name_of(peer) + " is no peer of rank " + std::to_string(identity.rank) +
                        " in a communicator of " + std::to_string(identity.size));
}

Transfer transfer_of(std::byte* data, std::size_t size, Rank peer, double timeout) {
  Transfer transfer;
  transfer.data = data;
  transfer.size = size;
  transfer.peer = peer;
  transfer.timeout = timeout;
  transfer.deadline = Deadline::after(timeout);
  return transfer;
}

// Returns what all ranks have agreed on. The number of calls decides, and not what is over by now:
// another thread may have made a call meanwhile, which is over on some ranks only.
bool agreed(Engine& engine, const std::optional<std::uint64_t>& since,
            const WaitLimit::Interrupt& interrupt) {
  std::unique_lock lock(engine.mutex);
  engine.life.require_alive();
  if (engine.identity.size == 1) return false;
  const std::uint64_t calls = engine.calls.over() + engine.calls.size();
  if (!engine.calls.empty()) {
    const std::shared_ptr<Work> last = engine.calls.last().work;
    engine.drive_or_wait(lock, *last, Deadline::never(), interrupt);
    last->rethrow();
  }
  return since && *since <= calls;
}

}  // namespace

Communicator::Communicator(Identity identity, const Tuning& tuning)
    : engine_((check(identity, tuning), std::make_unique<Engine>(std::move(identity), tuning))) {}

Communicator::~Communicator() {
  abort("the communicator was destroyed");
  engine_->stop_progress_thread();
  if (engine_->family) engine_->family->leave(*engine_);
}

const Identity& Communicator::identity() const noexcept { return engine_->identity; }

void Communicator::observe(std::shared_ptr<Observer> observer) {
  const std::unique_lock lock(engine_->mutex);
  engine_->next_observer = std::move(observer);
  if (const Driver* idle = engine_->driver.unless_taken(lock)) return engine_->take_observer(*idle);
  engine_->has_requests = true;
}

void Communicator::set_patience(double seconds) noexcept { engine_->patience = seconds; }

void Communicator::set_model(schedule::CostModel model) {
  const std::lock_guard lock(engine_->mutex);
  engine_->plans.set_model(std::move(model));
}

void Communicator::set_sites(schedule::Sites sites) {
  const std::lock_guard lock(engine_->mutex);
  engine_->plans.set_sites(std::move(sites));
}

bool Communicator::has_sites() const {
  const std::lock_guard lock(engine_->mutex);
  return engine_->plans.has_sites();
}

AwaitedSenders& Communicator::awaited_senders() noexcept { return engine_->senders; }

Traffic Communicator::traffic() const { return engine_->traffic.read(); }

// ---- Set-up ------------------------------------------------------------------------------------

void Communicator::adopt_control(transport::Connection connection, Rank peer) {
  const std::unique_lock lock(engine_->mutex);
  if (Driver* idle = engine_->driver.unless_taken(lock))
    idle->control.sockets().adopt(std::move(connection), peer);
}

void Communicator::adopt_link(Lane lane, std::string_view transport,
                              transport::Connection connection, Rank peer, double timeout,
                              const Interrupt& interrupt) {
  std::unique_lock lock(engine_->mutex);
  bool adopted = false;
  std::vector<int> link_of;
  const auto adopt = [&](Driver& driver) {
    Links& links = lane == Lane::kCollective ? driver.links : driver.transfer_links;
    links.offer(transport, std::move(connection), peer);
    if (driver.links.offered_all() && driver.transfer_links.offered_all()) {
      const WaitLimit wait_limit(Deadline::after(timeout), engine_->abort_or(interrupt));
      driver.links.complete(wait_limit);
      driver.transfer_links.complete(wait_limit);
    }
    link_of = driver.links.link_of();
    adopted = true;
  };
  if (const auto thrown = engine_->as_driver(lock, interrupt, adopt))
    std::rethrow_exception(thrown);
  if (!adopted) engine_->life.require_alive();
  engine_->link_of = std::move(link_of);
}

void Communicator::join(std::shared_ptr<Family> family) {
  {
    const std::lock_guard lock(engine_->mutex);
    engine_->family = std::move(family);
  }
  engine_->family->join(*engine_);
}

// ---- Calls -------------------------------------------------------------------------------------

void Communicator::run(const Request& request, const Interrupt& interrupt) {
  std::unique_lock lock(engine_->mutex);
  const std::shared_ptr<Work> work = engine_->enqueue(lock, request);
  engine_->drive_or_wait(lock, *work, Deadline::never(), interrupt);
  work->rethrow();
}

std::shared_ptr<Work> Communicator::begin(const Request& request,
                                          const std::function<void()>& slow) {
  std::unique_lock lock(engine_->mutex);
  std::shared_ptr<Work> work = engine_->enqueue(lock, request);
  if (engine_->has_only_one_call(lock))
    engine_->drive(lock, work.get(), nullptr, std::max(engine_->most_spins, 1U), slow);
  return work;
}

std::shared_ptr<Work> Communicator::submit(const Request& request) {
  std::unique_lock lock(engine_->mutex);
  engine_->start_progress_thread_once();  // which may throw
  std::shared_ptr<Work> work = engine_->enqueue(lock, request);
  engine_->start_progress_thread();
  return work;
}

std::shared_ptr<Work> Communicator::send(std::byte* data, std::size_t size, Rank to, double timeout,
                                         std::optional<DType> packed_as) {
  check_peer(engine_->identity, to);
  Transfer transfer = transfer_of(data, size, to, timeout);
  if (packed_as && codec::packs(*packed_as)) transfer.packed_as = packed_as;
  if (to == engine_->identity.rank) {
    transfer.copy.assign(data, data + size);
    transfer.data = transfer.copy.data();
  }
  return engine_->enqueue_transfer(std::move(transfer), /*sends=*/true);
}

std::shared_ptr<Work> Communicator::receive(std::byte* data, std::size_t size, Rank from,
                                            double timeout) {
  if (from != Transfer::kAnyRank) check_peer(engine_->identity, from);
  return engine_->enqueue_transfer(transfer_of(data, size, from, timeout), /*sends=*/false);
}

void Communicator::wait(Work& work, double timeout, const Interrupt& interrupt, bool background) {
  const Deadline deadline = Deadline::after(timeout);
  {
    std::unique_lock lock(engine_->mutex);
    engine_->drive_or_wait(lock, work, deadline, interrupt, background);
  }
  if (!work.done())
    throw Timeout(name_of(engine_->identity.rank) +
                      ": wait() timed out after its timeout=" + seconds_text(timeout) +
                      ", before its operation, which goes on; wait again or abort()",
                  kNoPeer);
  work.rethrow();
}

// ---- Requests to stop --------------------------------------------------------------------------

void Communicator::request_stop() noexcept { engine_->stop.own.make(); }
void Communicator::request_resize() noexcept { engine_->stop.resize.make(); }
bool Communicator::stop_requested() const noexcept { return engine_->stop.stop_requested(); }
bool Communicator::resize_requested() const noexcept { return engine_->stop.resize.made(); }

bool Communicator::should_stop(const Interrupt& interrupt) {
  return agreed(*engine_, engine_->calls.stop_since, interrupt) ||
         (engine_->identity.size == 1 && stop_requested());
}

bool Communicator::should_resize(const Interrupt& interrupt) {
  return agreed(*engine_, engine_->calls.resize_since, interrupt) ||
         (engine_->identity.size == 1 && resize_requested());
}

}  // namespace gradwire::exec
