#include "gradwire/serve/wire/poller.h"

#include <sched.h>
#include <sys/epoll.h>

#include <array>

#include "gradwire/transport/socket.h"

namespace gradwire::serve {
namespace {

// Turns without work, each after a yield, before a channel sleeps.
constexpr int kEmptyTurns = 20;
// Rounds with work, after which there is a look at the doorbells of those that sleep.
constexpr int kMostUnlooked = 4;
constexpr int kLongestSleep = 60'000;  // milliseconds

}  // namespace

Poller::Poller(Turn turn) : turn_(std::move(turn)), epoll_(transport::make_epoll()) {
  transport::watch(epoll_.get(), bell_.fd(), EPOLLIN, bell_.fd());
}

void Poller::add(Channel& channel) {
  const int doorbell = channel.doorbell();
  transport::watch(epoll_.get(), doorbell, EPOLLIN, doorbell);
  members_.emplace(doorbell, PolledChannel{&channel});
  ++awake_;
}

void Poller::remove(Channel& channel) {
  const auto found = members_.find(channel.doorbell());
  if (found == members_.end()) return;
  transport::unwatch(epoll_.get(), found->first);
  if (!found->second.asleep) --awake_;
  members_.erase(found);
}

void Poller::resume(Channel& channel) {
  const auto found = members_.find(channel.doorbell());
  if (found == members_.end()) return;
  PolledChannel& member = found->second;
  member.empty_turns = 0;
  if (!member.asleep) return;
  member.asleep = false;
  ++awake_;
  channel.disarm();
}

bool Poller::take_turn(PolledChannel& member) {
  const bool moved = turn_(*member.channel);
  member.empty_turns = moved ? 0 : member.empty_turns + 1;
  return moved;
}

// Announces the sleep, and looks once more: what came before is not rung for.
void Poller::fall_asleep(PolledChannel& member) {
  member.channel->arm();
  if (take_turn(member) || member.channel->ended()) return member.channel->disarm();
  member.asleep = true;
  --awake_;
}

bool Poller::round() {
  bool moved = false;
  for (auto& [doorbell, member] : members_) {
    if (member.asleep) continue;
    moved = take_turn(member) || moved;
    if (member.empty_turns > kEmptyTurns) fall_asleep(member);
  }
  if (!moved && awake_ > 0) ::sched_yield();
  moved_ = moved;
  return moved;
}

void Poller::wait(const Deadline& deadline) {
  if (moved_ && ++unlooked_ < kMostUnlooked) return;
  unlooked_ = 0;
  std::array<epoll_event, 64> events;
  const int timeout = awake_ == 0 ? deadline.milliseconds_left(kLongestSleep) : 0;
  const int ready = ::epoll_wait(epoll_.get(), events.data(), events.size(), timeout);
  for (int i = 0; i < ready; ++i) {
    const int doorbell = events[static_cast<std::size_t>(i)].data.fd;
    if (doorbell == bell_.fd()) {
      bell_.clear();
      continue;
    }
    const auto found = members_.find(doorbell);
    if (found != members_.end() && found->second.asleep) resume(*found->second.channel);
  }
}

}  // namespace gradwire::serve
