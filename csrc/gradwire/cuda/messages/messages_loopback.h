// Messages between virtual ranks: threads of one process, each on a GPU that it may share. A
// message is a copy on the receiver's stream, between two events. Every rank's thread comes to
// end(), which waits for the others to have come there too, and not for any device.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "gradwire/cuda/device.h"
#include "gradwire/cuda/messages/messages.h"

namespace gradwire::cuda {

// The state that the ranks of one group share.
class Loopback {
 public:
  Loopback(const Api& api, int size);

  // Called every 100 ms by a thread that waits; throws to end the wait.
  using Interrupt = std::function<void()>;

  // This rank's end, on this thread's device, whose streams alone may record the rank's events.
  // `timeout`: seconds that end() waits for another rank to come to its own; then
  // Timeout, which names it. The Loopback must outlive it.
  std::unique_ptr<Messages> endpoint(Rank rank, double timeout, Interrupt interrupt = nullptr);

  void abort(const std::string& reason) noexcept;

 private:
  class Endpoint;
  struct PostedSend {
    const std::byte* data = nullptr;
    std::size_t bytes = 0;
  };
  // The messages from one rank to another.
  struct Pair {
    std::deque<PostedSend> posted;  // not taken yet
    std::uint64_t taken = 0;        // messages so far: `taken_event` is recorded behind the last
    std::unique_ptr<OwnedEvent> taken_event;
  };
  Pair& pair(Rank from, Rank to);

  const Api& api_;
  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Pair> pairs_;
  std::vector<std::unique_ptr<OwnedEvent>> ready_;  // by sender: all that it has posted is there
  bool aborted_ = false;
  std::string reason_;
};

}  // namespace gradwire::cuda
