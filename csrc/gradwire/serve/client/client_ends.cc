// How a client's calls end: answered, too late, or with a channel.
#include <algorithm>
#include <utility>

#include "gradwire/base/error.h"
#include "gradwire/serve/client/client.h"

namespace gradwire::serve {

void Client::finish(const std::shared_ptr<ClientCall>& call, const std::exception_ptr& error) {
  if (std::exchange(call->over_, true)) return;
  std::erase(open_, call);
  for (ShardLink& link : links_) link.waiting.erase(call->sequence_);
  if (call->op_ == Op::kPush) {
    const std::lock_guard lock(mutex_);
    --unacknowledged_;
    ++acknowledgements_;
    acknowledged_.notify_all();
  }
  call->sent_ = {};
  call->work_.finish(error);
}

// Ends a call before all shards have answered. Payloads that a shard has refused still go into the
// residuals, and shards are told to drop a WAIT.
void Client::cut_short(const std::shared_ptr<ClientCall>& call, const std::exception_ptr& error) {
  if (call->gives_back_) {
    call->error_ = error;
    returning_.push_back(call);
    give_back_refused();
  }
  for (ShardLink& link : links_) {
    if (call->op_ != Op::kWait || call->answered_[index_of(link)]) continue;
    request(link, *call, /*extra=*/1);
    poller_.resume(*link.channel);
  }
  finish(call, error);
}

// Returns whether a call's deadline counts now: not for pushes that wait behind the one that is
// being sent.
bool Client::may_expire(const std::shared_ptr<ClientCall>& call) const {
  const auto found = std::ranges::find(outgoing_, call);
  return found == outgoing_.end() || found == outgoing_.begin();
}

Deadline Client::earliest() const {
  Deadline first = Deadline::never();
  for (const auto& call : open_)
    if (may_expire(call)) first = std::min(first, call->deadline_);
  return first;
}

void Client::expire() {
  for (const auto& call : std::vector(open_)) {
    if (!call->deadline_.passed() || !may_expire(call)) continue;
    std::string who;
    for (const ShardLink& link : links_)
      if (!call->answered_[index_of(link)])
        (who += who.empty() ? "" : ", ") += link.channel->peer();
    if (!outgoing_.empty() && outgoing_.front() == call) drop_first_outgoing();
    cut_short(call, std::make_exception_ptr(
                        Timeout(str_cat(who, ": no answer to ", name_of(call->op_),
                                        " in time; is it stopped, or the network slow?"),
                                kNoPeer)));
  }
}

// Takes the first push off the queue; what was not sent goes into its residuals.
void Client::drop_first_outgoing() {
  if (open_outgoing()) next_outgoing();
}

void Client::look_for_ends() {
  for (ShardLink& link : links_) {
    if (!link.channel->ended() || link.removed) continue;
    link.removed = true;
    poller_.remove(*link.channel);
    fail(std::make_exception_ptr(TransportError(link.channel->why(), kNoPeer)));
  }
}

// Ends all calls, and those that will be made.
void Client::fail(const std::exception_ptr& error) {
  {
    const std::lock_guard merging(merge_mutex_);
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = error;
    if (merged_.call) {
      ++unacknowledged_;
      submitted_.push_back(std::exchange(merged_, {}).call);
    }
  }
  take_submitted();
  while (!outgoing_.empty()) drop_first_outgoing();
  give_back_refused();
  for (const auto& call : std::vector(open_)) cut_short(call, error);
}

}  // namespace gradwire::serve
