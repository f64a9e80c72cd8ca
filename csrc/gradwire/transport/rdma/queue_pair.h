// QueuePair: one end of a reliable RDMA connection. It writes into the peer's memory, in order.
// Each write carries 32 bits of immediate data, which consume one receive request at the other end.
#pragma once

#include <cstdint>
#include <string>

#include "gradwire/transport/rdma/rdma_devices.h"

namespace gradwire::transport {

class QueuePair {
 public:
  // `port` must outlive it. Throws Error naming the verb that failed.
  QueuePair(const RdmaDevices& devices, const RdmaPort& port, ibv::Cq* cq, int sends, int receives);

  std::uint32_t number() const noexcept { return qp_->qp_num; }
  // Returns the most bytes that may be sent inline.
  std::size_t most_inline() const noexcept { return most_inline_; }

  // Connects to the peer's queue pair of that number. The first packet sequence numbers have 24
  // bits.
  void connect(std::uint32_t number, std::uint32_t first_packet, const RdmaAddress& address,
               std::uint32_t own_first_packet);
  // Aborts all writes under way. Nothing can be posted afterwards.
  void break_off() noexcept;

  struct Write {
    std::uint64_t id = 0;
    const std::byte* from = nullptr;
    std::uint32_t bytes = 0;  // sent inline where they are few enough, else from registered memory
    std::uint32_t key = 0;    // of the registered memory `from`
    std::uint64_t to = 0;
    std::uint32_t to_key = 0;
    std::uint32_t word = 0;  // the immediate data
    bool signaled = false;   // whether to ask for a completion
  };
  // Returns false, with errno set, where the device refuses it.
  bool post(const Write& write) noexcept;
  bool post_receive(std::uint64_t id) noexcept;

 private:
  void change(ibv::QpAttr& attributes, int mask, const char* to);

  const RdmaDevices& devices_;
  const RdmaPort& port_;
  std::size_t most_inline_ = 0;  // before qp_, whose initializer sets it
  Owned<ibv::Qp> qp_;
};

}  // namespace gradwire::transport
