// Poller: runs one thread over many channels. A channel with something to do has a turn in each
// round; others sleep until their doorbell rings, and cost nothing.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <vector>

#include "gradwire/base/bell.h"
#include "gradwire/base/deadline.h"
#include "gradwire/base/fd.h"
#include "gradwire/serve/wire/channel.h"

namespace gradwire::serve {

class Poller {
 public:
  // Handles at most one frame each way; returns whether it did anything.
  using Turn = std::function<bool(Channel&)>;

  explicit Poller(Turn turn);

  void add(Channel& channel);
  void remove(Channel& channel);
  // Gives a channel turns again, as something else than its doorbell says that it needs them.
  void rouse(Channel& channel);

  // Gives each channel that is awake a turn. Returns whether one of them did anything.
  bool round();
  // Sleeps until a doorbell rings, wake() is called or the deadline passes. Returns at once where a
  // channel is awake.
  void wait(const Deadline& deadline);
  // Ends a wait(). Any thread may call it.
  void wake() noexcept { bell_.ring(); }

 private:
  struct Member {
    Channel* channel;
    int empty_turns = 0;
    bool asleep = false;
  };
  bool take_turn(Member& member);
  void fall_asleep(Member& member);

  Turn turn_;
  UniqueFd epoll_;
  Bell bell_;
  std::map<int, Member> members_;  // by doorbell
  std::size_t awake_ = 0;
  bool moved_ = false;  // in the last round
  int unlooked_ = 0;    // rounds without a look at the doorbells
};

}  // namespace gradwire::serve
