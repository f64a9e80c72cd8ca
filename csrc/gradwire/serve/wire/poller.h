// Poller: runs one thread over many channels. Channels with something to do have a turn in each
// round. The others sleep, at no cost, until their doorbell rings.
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
  // Wakes a sleeping channel that has something to do for another reason than its doorbell.
  void resume(Channel& channel);

  // Gives each channel that is awake a turn. Returns whether one of them did anything.
  bool round();
  // Sleeps until a doorbell rings, wake() is called or the deadline passes. Returns at once where a
  // channel is awake.
  void wait(const Deadline& deadline);
  // Ends a wait(). Any thread may call it.
  void wake() noexcept { bell_.ring(); }

 private:
  struct PolledChannel {
    Channel* channel;
    int empty_turns = 0;
    bool asleep = false;
  };
  bool take_turn(PolledChannel& member);
  void fall_asleep(PolledChannel& member);

  Turn turn_;
  UniqueFd epoll_;
  Bell bell_;
  std::map<int, PolledChannel> members_;  // by doorbell
  std::size_t awake_ = 0;
  bool moved_ = false;  // in the last round
  int unlooked_ = 0;    // rounds since the doorbells were polled
};

}  // namespace gradwire::serve
