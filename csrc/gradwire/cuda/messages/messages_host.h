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

// Host functions, on whatever streams, that run in the order in which they were enqueued. CUDA may
// run all host functions of a process one after the other; then a function that waits for another
// rank must not come before the one for which that rank waits. Where each rank makes its calls on
// one thread, the order is the same on all ranks, whatever communicators the calls belong to.
class HostTurns {
 public:
  explicit HostTurns(const Api& api) : api_(api), last_(api) {}
  // Returns the turns of all calls on this thread's device.
  static HostTurns& here(const Api& api);

  void call(Stream stream, void (*function)(void*), void* argument);

 private:
  const Api& api_;
  std::mutex mutex_;
  OwnedEvent last_;
  bool recorded_ = false;
};

class HostMessages final : public Messages {
 public:
  // Only this uses `carrier`; `carrier` and `turns` outlive it. `timeout`: seconds for the messages
  // of a group.
  HostMessages(const Api& api, exec::Communicator& carrier, double timeout, HostTurns& turns);
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
  struct Group {
    HostMessages* owner = nullptr;
    std::vector<HostMessage> sends, receives;
    std::byte* pinned = nullptr;
    bool captured = false;                              // replays of the graph run it again
    std::vector<std::shared_ptr<Work>> sent, received;  // that may be under way
  };

  static void run(void* group);  // on CUDA's thread
  void exchange(Group& group);
  void pack(Group& group, HostMessage& host_message) const;
  void make_room(Group& group, HostMessage& host_message) const;
  void unpack(Group& group, const HostMessage& host_message) const;
  std::unique_ptr<Group> take_spare();
  bool await_end() const noexcept;
  bool are_over() const noexcept;
  void fail(const std::exception_ptr& error) noexcept;
  void await_abort() const noexcept;

  const Api& api_;
  exec::Communicator& carrier_;
  const double timeout_;
  HostTurns& turns_;
  Room pinned_;
  OwnedEvent ended_;  // recorded after the last group
  bool has_others_ = false;
  std::atomic<bool> is_aborted_ = false;
  std::unique_ptr<Group> posted_;
  mutable std::mutex mutex_;                    // guards all below
  std::vector<std::unique_ptr<Group>> groups_;  // that run, or will run
  std::vector<std::unique_ptr<Group>> spare_;
  std::vector<std::shared_ptr<Work>> left_;  // of groups that failed: they may use their memory
  std::exception_ptr error_;
};

}  // namespace gradwire::cuda
