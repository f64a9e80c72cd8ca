// Messages through the host: over the CPU transports of a communicator, through pinned memory. Of
// payloads whose size varies, only the bytes that count cross the network, so this suits hosts that
// are joined by a slow link.
//
// Each group is three steps on the stream: copies to pinned memory, a host function that sends and
// receives, and copies back. The stream waits in the function; the caller does not. Each rank must
// be a process of its own, since CUDA runs such functions one after the other.
#pragma once

#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "gradwire/cuda/device.h"
#include "gradwire/cuda/messages/messages.h"
#include "gradwire/exec/communicator.h"

namespace gradwire::cuda {

// A queue of host functions: they run in the order in which they were enqueued, on whatever
// streams. CUDA may run the host functions of a process one at a time. A function that waits for
// another rank must then not come before the one for which that rank waits. If each rank makes its
// calls on one thread, the order is the same on all ranks, for all communicators of a process
// together.
class HostFunctionQueue {
 public:
  explicit HostFunctionQueue(const Api& api) : api_(api), last_(api) {}
  // Returns the queue of all calls on this thread's device. It is never destroyed.
  static HostFunctionQueue& here(const Api& api);

  void enqueue(Stream stream, void (*function)(void*), void* argument);

 private:
  const Api& api_;
  std::mutex mutex_;
  OwnedEvent last_;
  bool recorded_ = false;
};

class HostMessages final : public Messages {
 public:
  // `carrier`, which nobody else may use, and `functions` must outlive it. `timeout`: seconds for
  // the messages of a group.
  HostMessages(const Api& api, exec::Communicator& carrier, double timeout,
               HostFunctionQueue& functions);
  ~HostMessages() override;

  std::string_view name() const noexcept override { return "host"; }
  void begin() override;
  void send(const std::byte* data, std::size_t bytes, Rank peer,
            std::span<const Slotted> layout) override;
  void receive(std::byte* data, std::size_t bytes, Rank peer,
               std::span<const Slotted> layout) override;
  void end(Stream stream) override;
  void check() override;
  void abort() noexcept override;
  bool rest() noexcept override;
  void join_others() noexcept override { has_others_ = true; }

 private:
  // One message: its place in device memory and in pinned memory.
  struct HostMessage {
    Rank peer = 0;
    std::byte* device = nullptr;
    std::size_t bytes = 0;
    std::size_t pinned = 0;  // offset
    std::vector<Slotted> layout;
    std::vector<std::byte> tables, body;  // as it is sent, where it has a layout
  };
  struct HostGroup {
    HostMessages* owner = nullptr;
    std::vector<HostMessage> sends, receives;
    std::byte* pinned = nullptr;
    bool captured = false;                              // replays of the graph run it again
    std::vector<std::shared_ptr<Work>> sent, received;  // that may be under way
  };

  static void run(void* group);  // on CUDA's thread
  void exchange(HostGroup& group);
  void pack(HostGroup& group, HostMessage& host_message) const;
  void make_room(HostGroup& group, HostMessage& host_message) const;
  void unpack(HostGroup& group, const HostMessage& host_message) const;
  std::unique_ptr<HostGroup> take_spare();
  bool await_end() const noexcept;
  bool are_over() const noexcept;
  void fail(const std::exception_ptr& error) noexcept;
  void await_abort() const noexcept;

  const Api& api_;
  exec::Communicator& carrier_;
  const double timeout_;
  HostFunctionQueue& functions_;
  Room pinned_;
  OwnedEvent ended_;  // recorded after the last group
  bool has_others_ = false;
  std::atomic<bool> is_aborted_ = false;
  std::unique_ptr<HostGroup> posted_;
  mutable std::mutex mutex_;                        // guards all below
  std::vector<std::unique_ptr<HostGroup>> groups_;  // that run, or will run
  std::vector<std::unique_ptr<HostGroup>> spare_;
  std::vector<std::shared_ptr<Work>> left_;  // of groups that failed: they may use their memory
  std::exception_ptr error_;
};

}  // namespace gradwire::cuda
