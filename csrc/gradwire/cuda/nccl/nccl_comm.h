// One rank's NCCL communicator, which does not block: no call into NCCL waits, so that another
// thread can end what is under way. Where the settings ask for one that blocks, a thread of its own
// makes these calls. messages/messages_nccl.h says what its messages promise.
#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "gradwire/base/deadline.h"
#include "gradwire/cuda/call_thread.h"
#include "gradwire/cuda/messages/messages_nccl.h"

namespace gradwire::cuda {

class NcclComm final : public Messages {
 public:
  // A message to send has `from`, one to receive has `to`; the other one is null.
  struct NcclMessage {
    const std::byte* from;
    std::byte* to;
    std::size_t bytes;
    Rank peer;
  };

  NcclComm(const Nccl& nccl, const nccl::UniqueId& id, const NcclSettings& settings);
  ~NcclComm() override;
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  std::string_view name() const noexcept override { return "nccl"; }
  void begin() override;
  void send(const std::byte* data, std::size_t bytes, Rank peer,
            std::span<const Slotted> /*layout*/) override {
    add({data, nullptr, bytes, peer});
  }
  void receive(std::byte* data, std::size_t bytes, Rank peer,
               std::span<const Slotted> /*layout*/) override {
    add({nullptr, data, bytes, peer});
  }
  void end(Stream stream) override;
  bool has_collectives() const noexcept override { return true; }
  void run_native(std::span<const NativeCollective> collectives, Stream stream) override;
  void check() override;  // does not wait for a call under way
  void abort() noexcept override;

 private:
  // What is waited for, and for how long from now on.
  struct Waiting {
    const char* what;
    std::span<const NcclMessage> messages;  // of a group
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
  Rank only_peer(std::span<const NcclMessage> messages) const noexcept;

  void add(const NcclMessage& message);
  // Throws what an earlier call threw, or Aborted.
  void require_alive() const;
  void require_not_aborted() const;
  nccl::Comm* take() noexcept;
  void end_apart(nccl::Result (*finish)(nccl::Comm*), nccl::Comm* comm, const char* name) noexcept;

  const Nccl& nccl_;
  const NcclSettings settings_;
  const std::uint32_t forks_;
  std::vector<NcclMessage> posted_;
  std::exception_ptr failure_;
  std::mutex aborts_;  // held during an abort, so that a second one returns no sooner
  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  const std::unique_ptr<CallThread> thread_;  // of calls that block; null where none does
};

}  // namespace gradwire::cuda
