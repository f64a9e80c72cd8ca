// One rank's NCCL communicator, which does not block: no call into NCCL waits, so that another
// thread can end what is under way. Where the settings ask for one that blocks, a thread of its own
// makes these calls. One thread at a time uses it; any thread may call abort().
#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "gradwire/base/deadline.h"
#include "gradwire/cuda/call_thread.h"
#include "gradwire/cuda/messages/messages_nccl.h"

namespace gradwire::cuda {

class NcclComm {
 public:
  // A message to send has `from`, one to receive has `to`; the other one is null.
  struct Message {
    const std::byte* from;
    std::byte* to;
    std::size_t bytes;
    Rank peer;
  };

  NcclComm(const Nccl& nccl, const nccl::UniqueId& id, const NcclSettings& settings);
  ~NcclComm();
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  // Sends and receives at least one message in one NCCL group, which is on the stream when this
  // returns.
  void exchange(std::span<const Message> messages, Stream stream);
  // Does what exchange() does with NCCL's own collectives, at least one.
  void run(std::span<const NativeCollective> collectives, Stream stream);
  // Throws if the communicator has failed meanwhile. Does not wait for a call under way.
  void check();
  // Throws what an earlier call threw, or Aborted.
  void require_alive() const;
  void abort() noexcept;

 private:
  // What is waited for, and for how long from now on.
  struct Waiting {
    const char* what;
    std::span<const Message> messages;  // of a group
    double seconds;
    Deadline deadline = Deadline::after(seconds);
  };

  // What calls use, even those for which nobody waits any more.
  struct Shared {
    std::mutex calls;  // held in every NCCL call with comm; only those that block take long
    std::atomic<nccl::Comm*> comm = nullptr;
    std::atomic<bool> aborted = false;
  };

  void connect(const nccl::UniqueId& id);
  bool disconnect() noexcept;
  template <typename Item>
  void post(std::span<const Item> group, Stream stream, const Waiting& waiting);
  // Makes a call with the communicator, which owns what it uses, and waits for its final result.
  template <typename Call>
  void make(Call call, const Waiting& waiting, const WaitLimit::Interrupt& interrupt);
  // The same of any call; returns its result.
  template <typename Call>
  nccl::Result make_apart(Call call, const Waiting& waiting, const WaitLimit::Interrupt& interrupt);
  nccl::Result state();  // kInProgress during a call
  // Waits for the final result, and throws unless that is success.
  void settle(nccl::Result result, const Waiting& waiting, const WaitLimit::Interrupt& interrupt);
  // Aborts the communicator where `call` throws: it is not used again after an error.
  template <typename Call>
  void or_abort(Call call);
  [[noreturn]] void fail(nccl::Result result, const Waiting& waiting) const;
  std::string who() const { return "rank " + std::to_string(settings_.rank) + ": "; }
  Rank only_peer(std::span<const Message> messages) const noexcept;

  void require_not_aborted() const;
  nccl::Comm* take() noexcept;
  void end_apart(nccl::Result (*end)(nccl::Comm*), nccl::Comm* comm, const char* name) noexcept;

  const Nccl& nccl_;
  const NcclSettings settings_;
  const std::uint32_t forks_;
  std::exception_ptr failure_;
  std::mutex aborts_;  // held during an abort, so that a second one returns no sooner
  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  const std::unique_ptr<CallThread> thread_;  // of calls that block; null where none does
};

}  // namespace gradwire::cuda
