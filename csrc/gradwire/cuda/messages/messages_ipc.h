// Messages between GPUs of one host that map each other's memory (cudaIpcMemHandle), in processes
// or threads, which may share GPUs. A group is one kernel, which copies what is sent into this
// rank's staging, and what is received out of the others'; and so is a whole all_reduce. Kernels
// wait for counters of the other ranks, and the host for nothing. So the kernels of all ranks must
// be able to run side by side or, in processes that share a GPU, by turns.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "gradwire/cuda/device.h"
#include "gradwire/cuda/messages/messages.h"

namespace gradwire::cuda {

// Where a rank's staging is, for the other ranks, which get these bytes as they are.
struct StagingAddress {
  std::uint64_t process = 0;     // a random number of the process
  std::uint64_t generation = 0;  // of the use of this memory; never 0
  std::uint64_t at = 0;          // address in that process
  std::int32_t device = 0;       // there
  std::int32_t is_exported = 0;  // whether other processes can map it
  MemoryHandle handle{};
};

// This rank's staging among `size` ranks, on this thread's device. The memory is never released,
// since CUDA forbids that while others map it, but used anew once all messages that mapped it have
// come to their end; never, where a rank has died. Where it becomes no messages, since a rank could
// not map the others', nobody works on it, and it is used anew at once.
class OwnStaging {
 public:
  // Throws InvalidArgument for more than kMostMapped ranks.
  OwnStaging(const Api& api, int size);
  ~OwnStaging();
  OwnStaging(const OwnStaging&) = delete;
  OwnStaging& operator=(const OwnStaging&) = delete;

  const StagingAddress& address() const noexcept { return address_; }
  int size() const noexcept { return size_; }

 private:
  friend class IpcMessages;
  const Api& api_;
  const int size_;
  std::byte* data_ = nullptr;
  StagingAddress address_;
};

class IpcMessages final : public Messages {
 public:
  // The most bytes that one-shot all_reduces read, of all ranks together. Two ranks read the same
  // either way, and always take one shot. To be measured: no GPU was at hand.
  static constexpr std::uint64_t kOneShotBytes = 2U << 20;

  // Maps the staging of all ranks, whose addresses are by rank. All ranks make it, on a thread
  // whose device is the rank's GPU. Throws InvalidArgument, naming the rank whose memory cannot be
  // mapped.
  IpcMessages(const Api& api, Rank rank, std::unique_ptr<OwnStaging> own,
              std::span<const StagingAddress> all, std::uint64_t one_shot_bytes = kOneShotBytes);
  ~IpcMessages() override;

  std::string_view name() const noexcept override { return "ipc"; }
  void begin() override;
  void send(const std::byte* data, std::size_t bytes, Rank peer,
            std::span<const Slotted> layout) override;
  void receive(std::byte* data, std::size_t bytes, Rank peer,
               std::span<const Slotted> layout) override;
  void end(Stream stream) override;
  bool has_reduce() const noexcept override { return true; }
  void reduce(std::span<const SummedRun> runs, const Sum& sum, Stream stream) override;
  const gradwire::cuda::Staging* staging() const noexcept override { return &staging_; }
  void check() override;
  void abort() noexcept override;
  bool rest() noexcept override;
  bool shares_memory() const noexcept override { return true; }
  void part() noexcept override { has_parted_ = true; }

 private:
  void map(Rank rank, const StagingAddress& address);
  void post(const StagedMessage& message);
  bool is_idle() const noexcept;

  const Api& api_;
  const std::uint64_t one_shot_bytes_;
  std::unique_ptr<OwnStaging> own_;
  std::vector<StagingAddress> all_;
  std::vector<void*> imported_;  // by rank; null: none
  int device_ = 0;
  Room pinned_;
  std::uint32_t* ended_ = nullptr;
  Staging staging_;
  std::vector<StagedMessage> posted_;
  std::atomic<bool> aborted_ = false;
  bool has_parted_ = false;
};

}  // namespace gradwire::cuda
