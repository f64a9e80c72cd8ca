// AwaitedSenders: the ranks from which threads of the program wait for messages, by other means
// than Communicator::wait(). Any thread may use it.
#pragma once

#include <algorithm>
#include <mutex>
#include <vector>

#include "gradwire/base/error.h"

namespace gradwire::exec {

class AwaitedSenders {
 public:
  // Begins and ends a thread's wait; kNoPeer: for a message from any rank.
  void add(Rank sender) {
    const std::lock_guard lock(mutex_);
    senders_.push_back(sender);
  }
  void remove(Rank sender) noexcept {
    const std::lock_guard lock(mutex_);
    const auto at = std::ranges::find(senders_, sender);
    if (at != senders_.end()) senders_.erase(at);
  }

  // Returns whether a recv from this rank, or from any if it is kNoPeer, may end a wait.
  bool contains(Rank sender) const noexcept {
    const std::lock_guard lock(mutex_);
    return sender == kNoPeer ? !senders_.empty()
                             : std::ranges::find(senders_, sender) != senders_.end();
  }
  // Returns a rank for which a thread waits; kNoPeer if there is none, or threads wait for any
  // rank.
  Rank one() const noexcept {
    const std::lock_guard lock(mutex_);
    return senders_.empty() ? kNoPeer : std::ranges::max(senders_);
  }

 private:
  mutable std::mutex mutex_;
  std::vector<Rank> senders_;
};

}  // namespace gradwire::exec
