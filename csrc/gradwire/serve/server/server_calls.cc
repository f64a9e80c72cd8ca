// What other threads ask of a server: admissions, snapshots, statistics. server.cc has what its own
// thread does.
#include <algorithm>
#include <chrono>
#include <future>
#include <utility>

#include "gradwire/base/error.h"
#include "gradwire/serve/server/server.h"

namespace gradwire::serve {
namespace {

constexpr std::size_t kMostSnapshots = 64;  // that one client may wait for

}  // namespace

void Server::admit(std::unique_ptr<Channel> channel, ClientId client) {
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return;
    Peer& peer = arrivals_.emplace_back();
    peer.id = client;
    peer.channel = std::move(channel);
  }
  poller_.wake();
}

void Server::want_snapshot(Peer& peer, const MessageHeader& header) {
  const std::lock_guard lock(mutex_);
  const auto same = [&](const auto& each) { return each.second.client == peer.id; };
  if (static_cast<std::size_t>(std::ranges::count_if(tickets_, same)) >= kMostSnapshots)
    throw InvalidArgument("too many snapshots at a time");
  new_tickets_.push_back(next_ticket_);
  tickets_[next_ticket_++] = {peer.id, header};
  wanted_.notify_all();
}

std::optional<std::uint64_t> Server::snapshot_wanted(double seconds) {
  std::unique_lock lock(mutex_);
  wanted_.wait_for(lock, std::chrono::duration<double>(seconds),
                   [this] { return stopping_ || !new_tickets_.empty(); });
  if (new_tickets_.empty()) return std::nullopt;
  const std::uint64_t ticket = new_tickets_.front();
  new_tickets_.pop_front();
  return ticket;
}

void Server::snapshot_written(std::uint64_t ticket, const std::string& error) {
  const std::lock_guard lock(mutex_);
  const auto found = tickets_.find(ticket);
  if (found == tickets_.end()) throw InvalidArgument("nobody waits for this snapshot");
  calls_.push_back([this, ticket = found->second, error] {
    for (auto& [channel, peer] : peers_) {
      if (peer.id != ticket.client) continue;
      error.empty() ? reply(peer, ticket.request)
                    : refuse(peer, ticket.request, {Refusal::kInvalid, error});
      poller_.resume(*channel);
    }
  });
  tickets_.erase(found);
  poller_.wake();
}

void Server::log_frames(std::function<void(const AppliedFrame&)> log) {
  frame_log_ = std::move(log);
  if (shard_) shard_->log_to(frame_log_);
}

// Runs what other threads have asked for.
bool Server::run_calls() {
  std::vector<std::function<void()>> calls;
  {
    const std::lock_guard lock(mutex_);
    calls.swap(calls_);
  }
  run_each(calls);
  return !calls.empty();
}

void Server::run_each(const std::vector<std::function<void()>>& calls) {
  for (const auto& each : calls) {
    try {
      each();
    } catch (const std::exception& error) {  // on_thread() has its own way to tell of errors
      say(error.what());
    }
  }
}

namespace {

template <typename Result>
Result await(std::future<Result>& done, const WaitLimit& limit) {
  while (done.wait_for(std::chrono::milliseconds(limit.turn_milliseconds())) !=
         std::future_status::ready) {
    limit.check_interrupt();
    if (limit.passed()) throw Timeout("timed out: the server's thread does not answer", kNoPeer);
  }
  return done.get();
}

}  // namespace

// Returns what `body` does on the server's thread; without a thread, or after its end, here. It may
// run after a Timeout, so it owns what it needs.
template <typename Body>
std::invoke_result_t<Body> Server::on_thread(Body body, const WaitLimit& limit) {
  const auto task = std::make_shared<std::packaged_task<std::invoke_result_t<Body>()>>(body);
  auto done = task->get_future();
  {
    const std::lock_guard lock(mutex_);
    if (!running_) return body();
    calls_.push_back([task] { (*task)(); });
  }
  poller_.wake();
  return await(done, limit);
}

Snapshot Server::snapshot(const WaitLimit& limit) {
  const auto vectors = std::make_shared<Vectors::Map>();
  const auto copy = on_thread(
      [this, vectors] {
        if (!shard_ || !shard_->has_values())
          throw InvalidArgument("there are no values to write yet");
        if (shard_->vectors() != nullptr) *vectors = shard_->vectors()->all();
        return std::make_shared<Snapshot>(shard_->outline());
      },
      limit);
  if (!vectors->empty()) {
    for (const auto& [name, values] : *vectors) copy->arrays.push_back({name, *values});
    // On that thread, which reuses the memory of vectors that nobody else holds.
    on_thread([vectors] { vectors->clear(); }, limit);
    return std::move(*copy);
  }
  // On this thread, since allocating so much memory takes long. A shard's size does not change.
  for (Snapshot::StateArray& each : copy->arrays) each.values.resize(shard_->layout().elements());
  const auto copied = std::make_shared<std::promise<void>>();
  std::future<void> done = copied->get_future();
  on_thread(
      [this, copy, copied] {
        shard_->begin_snapshot(copy, [copied] { copied->set_value(); });
        while (!running_ && copy_block()) continue;
      },
      limit);
  await(done, limit);
  return std::move(*copy);
}

std::string Server::statistics(const WaitLimit& limit) {
  return on_thread([this] { return statistics_text(); }, limit);
}

Server::Census Server::census(const WaitLimit& limit) {
  return on_thread(
      [this] { return Census{peers_.size(), admitted_, shard_ && shard_->has_values()}; }, limit);
}

}  // namespace gradwire::serve
