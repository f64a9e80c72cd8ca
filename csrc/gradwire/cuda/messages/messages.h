// Messages: how one rank's GPU exchanges bytes with other ranks'. What is posted between begin()
// and end() is one group: end() enqueues all of it on a stream, so that it reads what was there
// before on that stream, and what comes after finds it done: all of its bytes have arrived, and its
// memory is free again. Several messages of a group between the same two ranks match in their
// order.
//
// Three implementations: NCCL (messages_nccl.h), virtual ranks in one process
// (messages_loopback.h), the CPU transports (messages_host.h); and several of them at once
// (messages_routed.h). Belongs to one thread at a time; abort() is for any thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "gradwire/base/types.h"
#include "gradwire/cuda/api.h"

namespace gradwire::cuda {

// A stretch of a message of which not all bytes count: the sizes of its units, 4 bytes each, padded
// to kPayloadAlignment; then a slot for each unit, whose first bytes count, as many as its size
// says.
struct Slotted {
  std::uint64_t units = 0;
  std::size_t slot_bytes = 0;

  std::size_t table_bytes() const noexcept { return aligned(sizeof(std::uint32_t) * units); }
  std::size_t bytes() const noexcept { return table_bytes() + units * slot_bytes; }
};

class Messages {
 public:
  virtual ~Messages() = default;

  virtual std::string_view name() const noexcept = 0;

  virtual void begin() = 0;
  // `layout`: the stretches of all of it, in order, the same at both ends; empty: all bytes count.
  // Only the device knows which bytes count, so messages may still travel whole.
  virtual void send(const std::byte* data, std::size_t bytes, Rank peer,
                    std::span<const Slotted> layout = {}) = 0;
  virtual void receive(std::byte* data, std::size_t bytes, Rank peer,
                       std::span<const Slotted> layout = {}) = 0;
  // Throws TransportError, Timeout or Aborted as the CPU transports do; then nothing more may be
  // posted.
  virtual void end(Stream stream) = 0;

  // Throws what has failed since, on the stream.
  virtual void check() = 0;
  // Enqueued work ends, whatever the peers do; later calls throw Aborted.
  virtual void abort() noexcept = 0;

  // Before the end: waits for what is enqueued, but not for ever. False: something may refer to
  // this still, so it must not be destroyed.
  virtual bool rest() noexcept { return true; }

  // A word that devices can read, and that outlives this: kLost is set there before anything that
  // is enqueued goes on without the bytes that it waited for.
  virtual void tell_losses(std::uint32_t* word) { lost_ = word; }

 protected:
  void lose() noexcept {
    if (lost_ != nullptr) std::atomic_ref(*lost_).fetch_or(kLost);
  }

 private:
  std::uint32_t* lost_ = nullptr;
};

}  // namespace gradwire::cuda
