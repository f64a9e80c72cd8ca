// Messages between virtual ranks: threads of one process, each with a GPU that it may share. A
// message is a copy on the receiver's stream, between two events. Every rank's thread calls end(),
// which waits until the others have done so too, but not for any device.
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

// What the ranks of one group share. Any thread may use it.
class Loopback {
 public:
  Loopback(const Api& api, int size);

  // A waiting thread calls it about every 100 ms. It throws to end the wait.
  using Interrupt = std::function<void()>;

  // Returns the messages of this rank, whose streams must be of this thread's device. Their end()
  // waits `timeout` seconds for another rank to reach its own end(), then
  // throws Timeout, which names that rank. The Loopback must outlive the result.
  std::unique_ptr<Messages> endpoint(Rank rank, double timeout, Interrupt interrupt = nullptr);

  void abort(const std::string& reason) noexcept;

 private:
  class Endpoint;
  struct PostedSend {
    const std::byte* data = nullptr;
    std::size_t bytes = 0;
  };
  // The messages from one rank to another.
  struct RankPair {
    std::deque<PostedSend> posted;  // not received yet
    std::uint64_t taken = 0;        // messages received so far; `taken_event` follows the last one
    std::unique_ptr<OwnedEvent> taken_event;
  };
  RankPair& pair(Rank from, Rank to);

  const Api& api_;
  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<RankPair> pairs_;
  std::vector<std::unique_ptr<OwnedEvent>> ready_;  // by sender: all that it has posted is ready
  bool aborted_ = false;
  std::string reason_;
};

}  // namespace gradwire::cuda
